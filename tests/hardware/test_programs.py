"""The one-instruction programs themselves, without hardware: they assemble for sm_90a, the emulator runs them without a finding
in two interleavings, and where the manual decides the answer its answer is the manual's."""

import re
import subprocess

import numpy as np
import pytest
from programs import MODULES, everything
from programs.program import Bitwise, Within, emulate

from emulator import EmulatorError
from emulator.memwatch import MemoryWatch
from emulator.races import Races
from emulator.watch import Together

PROGRAMS = everything()


@pytest.mark.parametrize("module", MODULES)
def test_programs_assemble(module, tmp_path):
    """By ptxas (Triton ships it), all programs of a module in one file."""
    import triton

    texts = [p.text for p in PROGRAMS.values() if p.group == module]
    head = texts[0][: texts[0].index(".visible")]
    bodies = [t[len(head) :].replace(".entry k(", f".entry k{i}(").replace("p_", f"p{i}_") for i, t in enumerate(texts)]
    source = tmp_path / "programs.ptx"
    source.write_text(head + "\n".join(bodies))
    done = subprocess.run(
        [triton.knobs.nvidia.ptxas.path, "-arch=sm_90a", "-O1", "-o", tmp_path / "out.cubin", source],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[:2000]
    assert "wgmma" not in done.stderr, done.stderr[:2000]  # ptxas tells when it had to serialise wgmmas


@pytest.mark.parametrize("name", PROGRAMS)
def test_emulator_gives_the_manuals_answer(name):
    """And the same one in another interleaving, with nothing found by the watchers in either."""
    program = PROGRAMS[name]
    if program.traps:
        with pytest.raises(EmulatorError, match="accepted"):
            emulate(program)
        return
    answers = []
    for seed in (None, 1):
        watch = Together(Races(), MemoryWatch())
        answers.append(emulate(program, seed, watch))
        assert watch.report() == []
    assert Bitwise().complaint(program.inputs, *answers) is None
    expected = program.expected()
    if expected is not None:
        assert program.compare.complaint(program.inputs, expected, answers[0]) is None
    elif isinstance(program.compare, Within):
        assert program.compare.complaint(program.inputs, answers[0], answers[0]) is None
    assert any(np.any(y.view(f"u{y.itemsize}") != 0) for y in answers[0].values())


def test_only_sums_and_approximations_are_left_to_the_hardware():
    open_ = [p.name for p in PROGRAMS.values() if p.manual is None and not p.traps]
    assert all(re.search(r"approx|div\.full|spread", n) for n in open_)
