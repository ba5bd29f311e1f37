"""Cheats that need a GPU: the work escapes the caller's stream, or the capture. `pytest -m gpu tests/dishonest`."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
import torch

from ladder import bench as benching
from ladder.check import Options, Run
from tests.dishonest.test_dishonest import _naive

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
CAUGHT = {
    "side_stream": ("second stream", r"work was launched elsewhere\?|on a second stream: o: |NaN"),
    "empty_capture": ("CUDA graph", r"the captured graph does not write o"),
    "current_stream": ("global state", r"changes the current stream"),
    "shared_scratch": ("two streams at once", r"of two at once, against a call alone"),
    "leaks": ("memory flat", r"leaks 10485\d\d bytes of device memory a call"),
    "grows_with_shapes": ("many shapes", r"CALLS holds \d+ calls, accepted: 8"),
}  # fmt: skip
BENCH = {"empty_capture": r"graph replay does not do the call's work", "cached_by_address": r"old answer",
         "patches_the_clock": r"replaces .*torch\.cuda\.Event\.elapsed_time"}  # fmt: skip


@pytest.fixture
def arch() -> str:
    from ladder.timing import device_arch

    return device_arch(torch.device("cuda"))


@pytest.mark.parametrize("name", CAUGHT)
def test_check_rejects_it(cheat, arch, name):
    by, message = CAUGHT[name]
    ladder = cheat(name, arch, gpu=True)
    rows = Run(ladder, [2], Options(properties=[by], cases=["tiny"], seed=7, records_dir=Path(ladder.root) / "out")).execute()
    failed = [row for row in rows if row["outcome"] == "failed"]
    assert failed and re.search(message, failed[0]["reason"]), rows


def test_honest_rung_is_accepted(cheat, arch):
    properties = sorted({by for by, _ in CAUGHT.values()} | {"two threads at once", "own code", "patches nothing"})
    ladder = cheat("side_stream", arch, gpu=True)
    rows = Run(ladder, [1], Options(properties=properties, cases=["tiny"], seed=7, records_dir=Path(ladder.root) / "out")).execute()
    assert [row for row in rows if row["outcome"] != "passed"] == []


@pytest.mark.parametrize("name", BENCH)
def test_bench_gives_it_no_time(cheat, arch, name):
    thread_time, elapsed = time.thread_time, torch.cuda.Event.elapsed_time
    try:
        run = benching.Run(cheat(name, arch, gpu=True), [2], benching.Options(seed=3, seconds=0.1, cases=["tiny"]), benching.cuda_timer())
        run.execute()
    finally:
        time.thread_time, torch.cuda.Event.elapsed_time = thread_time, elapsed
    assert run.records[0]["cells"] == [] and re.search(BENCH[name], run.failures[0]), run.failures


def test_bench_times_the_others_by_replay(cheat, arch):
    """A capture that was refused, the first of all, spoils none of the later ones."""
    options = benching.Options(seed=3, seconds=0.1, cases=["tiny"])
    run = benching.Run(cheat("empty_capture", arch, gpu=True), [2, 1], options, benching.cuda_timer())
    run.execute()
    cheating, honest = run.records
    assert cheating["cells"] == [] and len(run.failures) == 1, run.failures
    cell = honest["cells"][0]
    assert cell["clocks"] == {"rung": "graph", "parent": "graph", "control": "graph"}, cell["not_captured"]
    assert torch.rand(8, device="cuda").isfinite().all()


@pytest.mark.parametrize("name", ["side_stream", "empty_capture", "current_stream"])
def test_naive_harness_accepts_it(cheat, arch, name):
    assert _naive(cheat(name, arch).root / "ideas" / f"002-{name.replace('_', '-')}", "cuda")
