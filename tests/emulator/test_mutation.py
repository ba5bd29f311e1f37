"""Planted faults in the state kernels are found, at their place, and clean kernels are silent. The whole sweep is slow;
its table is emulator/MUTATIONS.md."""

import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from _common.cute import Unit
from emulator import mutants
from emulator.cute_host import EmulatedTarget
from emulator.memwatch import MemoryWatch
from emulator.mutate import CHUNKS, ROOT, RUNGS, SOURCES, Problem, Subject, _original, justification, sweep, verdict
from emulator.races import Races
from emulator.watch import Together

KERNELS = [(rung, arch) for rung in RUNGS for arch in SOURCES]
OWN = [(rung, arch) for rung, arch in KERNELS if _original(rung, arch) == rung]


@functools.cache
def small(rung, arch):
    return Subject(rung, arch, Problem(CHUNKS[rung, arch], K=64))


@pytest.mark.parametrize(
    "rung, arch, name, by, said",
    [
        ("002", "sm_90a", "no fence: fence.proxy.async #0", "race", "without fence.proxy.async"),
        ("002", "sm_90a", "no wait: wgmma.wait_group #0", "protocol", "has not waited for"),
        ("002", "sm_90a", "barrier in a tile: first tile #0", "memory", "holds a live mbarrier"),
        ("002", "sm_90a", "decay row: one early #0", "numbers", "exceeds the budget"),
        ("002", "sm_100a", "not zeroed: accumulate #0", "race", "read of what nobody wrote"),
        ("002", "sm_100a", "transposed: stmatrix #0", "numbers", "exceeds the budget"),
        ("003", "sm_90a", "no arrive: mbarrier.arrive #0", "deadlock", "31 of 34 arrivals|32 of 34 arrivals"),
        ("003", "sm_90a", "wrong phase: flipped #3", "deadlock|protocol|race", ""),
        ("003", "sm_90a", "Aqk not zeroed", "numbers", "NaN"),
        ("003", "sm_100a", "no commit: tcgen05.commit #0", "deadlock", "1 of 1 arrivals"),
        ("003", "sm_100a", "byte count: -16 #0", "deadlock|protocol", "-16 bytes missing"),
        ("003", "sm_100a", "no wait: mbarrier.try_wait #0", "race|protocol", ""),
        ("003", "sm_100a", "one barrier for two: its neighbour's #14", "race|protocol|memory|deadlock", ""),
    ],
)
def test_a_mutant_is_found(rung, arch, name, by, said):
    subject = small(rung, arch)
    (mutant,) = (m for m in subject.mutants if m.name == name)
    outcome = subject.try_mutant(mutant)
    assert outcome.by and re.fullmatch(by, outcome.by), outcome
    assert re.search(said, outcome.message), outcome
    if outcome.by != "numbers":
        assert f"kernel {subject.kernel}, CTA (0,0,0)" in outcome.message and re.search(r"warp \d", outcome.message)
        assert f"ideas/{RUNGS[rung]}/{SOURCES[arch]}:" in outcome.message


@pytest.mark.parametrize("rung, arch", OWN)
def test_every_synchronisation_has_a_mutant(rung, arch):
    """Counted in the text, independently of the decoder; names are unique, and the number of lines stays."""
    subject = small(rung, arch)
    lines = [line.split("//")[0] for line in subject.ptx.split("\n")]
    words = (
        r"fence|bar\.|wgmma\.(fence|commit|wait)|tcgen05\.(commit|wait|dealloc)|mbarrier\.(arrive|try_wait|init)"
        r"|cp\.async\.bulk\.(commit|wait)"
    )
    expected = [n for n, line in enumerate(lines, 1) if re.match(rf"\s*(@!?%\w+\s+)?({words})", line)]
    removed = [m for m in subject.mutants if m.kind.startswith("no ")]
    assert sorted(m.line for m in removed) == expected
    assert len({m.name for m in subject.mutants}) == len(subject.mutants)
    for m in subject.mutants:
        text = m.apply(subject.ptx)
        assert text.count("\n") == subject.ptx.count("\n")
        assert (text != subject.ptx) == bool(m.edits)


def test_every_justification_is_of_a_mutant():
    reasons = yaml.safe_load((ROOT / "emulator/survivors.yaml").read_text())
    for kernel, named in reasons.items():
        names = {m.name for m in small(*kernel.split()).mutants}
        assert set(named) <= names and all(named.values())


@pytest.mark.parametrize("rung, arch", OWN)
def test_the_table_is_of_this_code(rung, arch):
    """MUTATIONS.md has every mutant at the PTX and source line where it now is; only the justified are not found."""
    text = (ROOT / "emulator/MUTATIONS.md").read_text()
    section = text.split(f"\n## {rung}, {arch}\n")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.split("\n") if line.startswith("| ")][2:]
    now = Subject(rung, arch, Problem(2)).mutants
    places = [f"{Path(m.source[0]).name}:{m.source[1]}" if m.source else "" for m in now]
    assert [row[:3] for row in rows] == [[m.name, str(m.line or ""), at] for m, at in zip(now, places)]
    assert {row[0] for row in rows if row[3] == "-"} == {m.name for m in now if justification(rung, arch, m)}


def test_a_mutant_names_its_line():
    subject = small("003", "sm_90a")
    (fence,) = (m for m in subject.mutants if m.name == "no fence: fence.proxy.async #0")
    assert "fence.proxy.async" in subject.ptx.split("\n")[fence.line - 1]
    path, line = fence.source
    assert 'fence_proxy("async.shared"' in Path(path).read_text().split("\n")[line - 1]


@pytest.mark.parametrize("rung, arch", OWN)
def test_clean_kernels_are_silent(rung, arch):
    silent(small(rung, arch), [None, 1, 2])


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("rung, arch", OWN)
def test_clean_kernels_are_silent_under_twenty_interleavings(rung, arch):
    silent(Subject(rung, arch, Problem(CHUNKS[rung, arch])), [None, *range(1, 21)])


def silent(subject, seeds):
    first = None
    for seed in seeds:
        watch = Together(Races(), MemoryWatch())
        answer = subject.run(seed=seed, watch=watch)
        assert watch.report() == [] and not subject.problem.judge(*answer), seed
        first = first or answer
        assert all(torch.equal(a, b) for a, b in zip(first, answer)), seed


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("rung, arch", KERNELS)
def test_whole_rungs_are_silent_under_twenty_interleavings(rung, arch):
    """Every stage, the Triton kernels included. What is found in fla's own kernels is fla's."""
    script = Path(__file__).with_name("interleavings_process.py")
    command = [sys.executable, str(script), str(ROOT / "ideas" / RUNGS[rung]), arch, "20"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(rows) == 21 and len({row["bits"] for row in rows}) == 1
    for row in rows:
        assert not row["wrong"], row
        assert not [text for text in row["found"] if ", source fla/" not in text.partition(";")[0]], row


@pytest.mark.parametrize("arch, function", [("sm_90a", "store"), ("sm_100a", "hand_over")])
def test_a_copy_of_004_without_a_fence(tmp_path, arch, function):
    """The reader's slip: a new rung from 004, one fence forgotten. The finding names the line of the copy there that
    reads what was stored, and the line of the store."""
    text = (ROOT / "ideas" / RUNGS["004"] / SOURCES[arch]).read_text().split("\n")
    start = next(i for i, line in enumerate(text) if line.strip().startswith(f"def {function}("))
    at = next(i for i in range(start, len(text)) if "fence_proxy(" in text[i])
    del text[at]
    source = tmp_path / SOURCES[arch]
    source.write_text("\n".join(text))
    subject = small("004", arch)
    params = [("K", 64), ("V", 64), ("dtype", "bfloat16"), ("has_h0", True)] + [("v_tile", 64)] * (arch == "sm_90a")
    watch = Races()
    run = EmulatedTarget(arch, watch=watch).load(Unit("kda_state", source, arch, tuple(params)))
    run(*subject.problem.operands.values(), *subject.problem.outputs(), subject.problem.scale)
    found = [m for m in watch.report() if "without fence.proxy.async" in m]
    places = [[int(n) for n in re.findall(rf"{source.name}:(\d+)", m)] for m in found]
    assert found and all(len(p) == 2 for p in places)
    reads, stores = ({text[p[i] - 1].strip() for p in places} for i in (0, 1))
    if arch == "sm_90a":
        assert "cute.copy(o.atom, o.smem[None, stage], o.gmem[None, c])" in reads, reads
        assert any(at < p[0] <= at + 3 for p in places)  # the fence stood right above
        assert all("copy_o" in line for line in stores), stores
    else:
        assert reads == {"cute.gemm(tiled, out, a[None, None, k, a_stage], b[None, None, k, b_stage], out)"}, reads
        assert all("cute.copy(write_" in line for line in stores), stores


@pytest.mark.slow
@pytest.mark.timeout(5400)
@pytest.mark.parametrize("rung, arch", OWN)
def test_sweep(rung, arch):
    outcomes = sweep(rung, arch)
    described = {line.split("|")[1].strip() for line in mutants.__doc__.split("\n") if line.startswith("| ")}
    assert {o.mutant.kind for o in outcomes} <= described
    faults = [f for o in outcomes if (f := verdict(rung, arch, o))]
    assert not faults, "\n".join(faults)
