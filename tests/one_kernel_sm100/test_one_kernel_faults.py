"""Every synchronisation of rung 006's Blackwell SCAN taken out of the PTX, one at a time: the emulator finds each."""

from pathlib import Path

import pytest

from _common import target as targets
from emulator import EmulatedTarget, EmulatorError
from emulator.launch import Device, decode
from emulator.memwatch import MemoryWatch
from emulator.mutants import enumerate_mutants
from emulator.races import Races
from emulator.watch import Together
from kernels.kda import budget, inputs, oracle
from kernels.kda.cases import Case
from ladder import loader

FOLDER = Path(__file__).resolve().parents[2] / "ideas" / "006-one-kernel"
SCAN = ("scan_sm100.py", "kda_sm100.py", "tmem.py")
KINDS = ("no fence", "no wait", "no arrive", "no commit", "no barrier")
UNMODELLED = ("tcgen05.fence", "fence.mbarrier_init")  # the emulator orders by barriers alone
SURVIVE = {
    "cp.async.bulk.wait_group.read #0": "v of the first chunk: no store is under way yet",
    "mbarrier.try_wait #7": "OUTPUT's wait on free: o_full says as much, if a commit releases what its warp has seen",
}


class Faulty(Device):
    """A device that launches a mutant of what it is given."""

    mutant = None

    def launch(self, text, *rest, **named):
        self.text = text
        return super().launch(self.mutant.apply(text) if self.mutant else text, *rest, **named)


def found(mutant, seed):
    """(what finds the mutant, or None; the text that was launched)."""
    call = inputs.make(Case("faults", 1, 200, 1, 1, 64, 64, initial_state=True), "slow", "pre", 7).call()
    device = Faulty("sm_100a", seed, Together(Races(), MemoryWatch()))
    device.mutant = mutant
    try:
        with targets.use(EmulatedTarget("sm_100a", device=device)):
            out = loader.load(FOLDER).chunk_kda(**call)
    except EmulatorError as error:
        return str(error), device.text
    verdicts = budget.judge(*out, budget.reference(oracle.chunked(**call), **call))
    wrong = [*device.watch.report(), *(v.reason for v in verdicts if not v.passed)]
    return (wrong[0] if wrong else None), device.text


@pytest.mark.slow
@pytest.mark.timeout(5400)
def test_each_missing_synchronisation_is_found():
    clean, text = found(None, None)
    assert clean is None
    (kernel,) = decode(text).kernels
    mutants = [m for m in enumerate_mutants(text, kernel, {}, []) if m.kind in KINDS and m.source
               and m.source[0].endswith(SCAN) and not any(word in m.text for word in UNMODELLED)]  # fmt: skip
    assert len(mutants) > 30
    survivors = [m.name for m in mutants if not any(found(m, seed)[0] for seed in (None, 1))]
    assert {name.split(": ", 1)[1] for name in survivors} == set(SURVIVE), survivors
