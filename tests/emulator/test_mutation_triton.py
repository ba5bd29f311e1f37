"""Synchronisation missing from 004's Triton kernel is found at its place. The whole sweep is slow; its table is a section
of emulator/MUTATIONS.md."""

import functools
import re

import pytest

from emulator import mutate_triton
from emulator.memwatch import MemoryWatch
from emulator.mutate import ROOT
from emulator.mutate_triton import ARCHS, Stage, justification, sweep, verdict
from emulator.races import Races
from emulator.watch import Together

stage = functools.cache(Stage)


@pytest.mark.parametrize(
    "arch, name, by, said",
    [
        ("sm_90a", "no barrier: bar #0", "race", "not ordered after"),
        ("sm_90a", "no fence: fence.proxy.async #0", "race", "without fence.proxy.async"),
        ("sm_90a", "no wait: wgmma.wait_group #11", "protocol", "has not waited for"),
        ("sm_90a", "no fence: wgmma.fence #0", "protocol", "before the first wgmma.fence"),
        ("sm_90a", "no commit: wgmma.commit_group #1", "race", "wgmma of warpgroup 0"),
        ("sm_100a", "no init: mbarrier.init #0", "protocol", "no initialised mbarrier"),
        ("sm_100a", "no commit: tcgen05.commit #0", "deadlock", "1 of 1 arrivals"),
        ("sm_100a", "no wait: mbarrier.try_wait #0", "race|protocol", ""),
        ("sm_100a", "no fence: fence.proxy.async #0", "race", "without fence.proxy.async"),
        ("sm_100a", "no dealloc: tcgen05.dealloc #0", "protocol", "without freeing tensor memory"),
    ],
)
def test_a_missing_instruction_is_found(arch, name, by, said):
    (mutant,) = (m for m in stage(arch).mutants if m.name == name)
    outcome = stage(arch).try_mutant(mutant)
    assert outcome.by and re.fullmatch(by, outcome.by), outcome
    assert re.search(said, outcome.message), outcome
    assert "kernel kda_intra_fused, CTA (0,0,0)" in outcome.message and "intra.py:" in outcome.message, outcome


@pytest.mark.parametrize("arch", ARCHS)
def test_every_synchronisation_has_a_mutant(arch):
    """Counted in the text, independently of the decoder."""
    words = (r"fence|membar|bar\.|barrier\.|wgmma\.(fence|commit|wait)|tcgen05\.(commit|wait|fence|dealloc)"
             r"|mbarrier\.(arrive|try_wait|test_wait|init)|cp\.async\.(bulk\.)?(commit|wait)")  # fmt: skip
    lines = stage(arch).ptx.split("\n")
    expected = [n for n, line in enumerate(lines, 1) if re.match(rf"\s*(@!?%\w+\s+)?({words})", line)]
    assert [m.line for m in stage(arch).mutants] == expected and len(expected) > 80
    for m in stage(arch).mutants:
        assert m.apply(stage(arch).ptx).count("\n") == len(lines) - 1


@pytest.mark.parametrize("arch", ARCHS)
def test_the_clean_kernel_is_silent(arch):
    for seed in (None, 1):
        watch = Together(Races(), MemoryWatch())
        assert not stage(arch).judge(*stage(arch).run(seed=seed, watch=watch)) and watch.report() == [], seed


@pytest.mark.parametrize("arch", ARCHS)
def test_the_table_is_of_this_kernel(arch):
    text = (ROOT / "emulator/MUTATIONS.md").read_text().partition(mutate_triton.HEADING)[2]
    section = text.split(f"\n## 004 intra, {arch}\n")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.split("\n") if line.startswith("| ")][2:]
    assert [row[0] for row in rows] == [m.name for m in stage(arch).mutants]
    survivors = {row[0] for row in rows if row[3] == "-"}
    assert survivors == {m.name for m in stage(arch).mutants if justification(arch, m)} == set(mutate_triton._reasons()[arch])


@pytest.mark.slow
@pytest.mark.timeout(5400)
@pytest.mark.parametrize("arch", ARCHS)
def test_sweep(arch):
    assert not [f for o in sweep(arch) if (f := verdict(arch, o))]
