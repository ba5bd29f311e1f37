"""Every synchronisation of PREP, SHIP and `receive`, and what starts and ends SCAN's, taken out of rung 009's Blackwell PTX
one at a time: the emulator finds each."""

import pytest

from emulator import EmulatorError
from emulator.launch import decode
from emulator.memwatch import MemoryWatch
from emulator.mutants import Mutant, enumerate_removals
from emulator.races import Races
from emulator.watch import Together
from kernels.kda import budget, oracle
from tests.helped import Faulty, drawn, guarded, rung

SOURCES = ("helpers.py", "prep.py", "kda_sm100.py")
ORDER = (("st.release.gpu", "st.relaxed.gpu"), ("ld.acquire.gpu", "ld.volatile"))  # ld.volatile: relaxed.sys
PATIENCE = 2000  # times that a row asks for a word; in these clean runs three to five
OWN_BLOCK = {"bar #9": "between B and D: with K = 64 a warp inverts the diagonal block that it has written itself"}
SURVIVE = {  # in both orders
    "prod": OWN_BLOCK,
    "pre": OWN_BLOCK | {"mbarrier.try_wait #11": "free, before beta is written: a gate of 32 bits has come to the slot by then"},
}


class Patient(MemoryWatch):
    """Nobody asks for a word for ever."""

    def launch(self, machine):
        super().launch(machine)
        self.asked = 0

    def access(self, machine, f, ins, *rest):
        super().access(machine, f, ins, *rest)
        self.asked += bool({"acquire", "volatile"} & set(ins.parts))
        if self.asked > PATIENCE:
            raise EmulatorError(f"a word was asked for {PATIENCE} times")


@pytest.fixture
def found(monkeypatch):
    """(mutant or None, seed, form) -> (what finds it, or None; the text that was launched). A row and one helper."""
    one = rung("009-helpers", monkeypatch, 2, (0.0, 2, 0))

    def run(mutant, seed, form="prod"):
        call = drawn(330, 1, 64, "slow", form)
        memory = Patient()
        device = Faulty("sm_100a", seed, Together(Races(), memory))
        device.mutant = mutant
        try:
            out = guarded(one, call, device, memory)
        except EmulatorError as error:
            return str(error), device.texts[-1]
        verdicts = budget.judge(*out, budget.reference(oracle.chunked(**call), **call))
        wrong = [*device.watch.report(), *(v.reason for v in verdicts if not v.passed)]
        return (wrong[0] if wrong else None), device.texts[-1]

    return run


def changed(text: str, old: str, new: str) -> Mutant:
    """Every `old` made `new`."""
    lines = enumerate(text.split("\n"), 1)
    edits = tuple((number, line.replace(old, new)) for number, line in lines if old in line)
    assert edits, old
    return Mutant(f"{new or 'nothing'} for {old}", "order", edits=edits)


def test_release_acquire_and_proxy_fence_are_asked_for(found):
    clean, text = found(None, None)
    assert clean is None
    for mutant in (*(changed(text, *pair) for pair in ORDER), changed(text, "fence.proxy.async;", "")):
        assert "what another CTA of the same launch wrote" in found(mutant, None)[0], mutant.name


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("form", ["prod", "pre"])
def test_each_missing_synchronisation_is_found(found, form):
    clean, text = found(None, None, form)
    assert clean is None
    (kernel,) = decode(text).kernels
    mutants = [m for m in enumerate_removals(text, kernel) if m.source and m.source[0].endswith(SOURCES)
               and "mbarrier_init" not in m.text]  # fmt: skip
    assert len(mutants) > 30
    survivors = [m.name for m in mutants if not any(found(m, seed, form)[0] for seed in (None, 1))]
    assert {name.split(": ", 1)[1] for name in survivors} == set(SURVIVE[form]), survivors
