"""Each dishonest rung passes a naive harness, and is then rejected by `check` or `bench` in words that say what it did."""

from __future__ import annotations

import multiprocessing
import re
from pathlib import Path

import pytest
import torch

from ladder import bench as benching
from ladder.check import Options, Run
from ladder.loader import load
from tests.dishonest import naive
from tests.dishonest.conftest import RUNGS
from tests.runner.test_bench import HostTimer

# rung -> (the property, or `bench`, that rejects it; what the message says)
CAUGHT = {
    "cached_by_address": ("reused input memory", r"cached by address"),
    "cached_by_shape": ("first output survives", r"returned the first call's values"),
    "cached_when_warm": ("reused input memory", r"cached by address"),
    "previous_buffer": ("first output survives", r"both calls returned the same buffer"),
    "ring_of_buffers": ("first output survives", r"after \d+ more calls \(a buffer is used again\)"),
    "previous_answer": ("first output survives", r"returned the first call's values"),
    "first_call_only": ("first output survives", r"second call: o: row error"),
    "background_thread": ("finished when returned", r"something goes on writing it in the background"),
    "lazy": ("oracle", r"o: returned a Later, accepted: a plain torch.Tensor, computed when returned"),
    "nan_filled": ("oracle", r"o: NaN or Inf in \d+ of \d+ rows, first at batch 0, token 127"),
    "zero_filled": ("oracle", r"o: row error .* token 127"),
    "unwritten_row": ("every row written", r"o: \d+ of \d+ rows still hold the poison"),
    "known_seed": ("oracle", r"o: row error"),
    "one_wrong_row": ("oracle", r"o: row error .* at batch 0, token 64, head 1 exceeds the budget .* \(1 of \d+ rows do\)"),
    "wrong_state": ("oracle", r"^final_state: row error"),
    "four_bits": ("oracle", r"o: row error"),
    "no_lower_left": ("oracle", r"o: row error .* exceeds the budget"),
    "future_token": ("causality", r"reads future tokens: changing only tokens \d+ onward"),
    "mutates_input": ("inputs untouched", r"writes into the caller's k"),
    "mutates_state": ("inputs untouched", r"writes into the caller's initial_state"),
    "calls_the_parent": ("own code", r"runs code of another rung: opened .*001-honest/kernel.py"),
    "reads_the_parent": ("own code", r"runs code of another rung: opened .*001-honest/kernel.py"),
    "keeps_flas_stage": ("own code", r"says it replaces the stage scan, but launches fla's chunk_gated_delta_rule_fwd"),
    "turns_tf32_on": ("global state", r"changes torch.backends.cuda.matmul.allow_tf32 from False to True"),
    "default_dtype": ("global state", r"changes the default dtype from torch.float32 to torch.float16"),
    "determinism_off": ("global state", r"changes deterministic algorithms.* from True to False"),
    "seeds_the_generator": ("global state", r"changes the default random state"),
    "grad_off": ("global state", r"changes grad mode from True to False"),
    "environment": ("global state", r"changes the environment variable TRITON_F32_DEFAULT from None to tf32"),
    "patches_the_checker": ("patches nothing", r"replaces ladder.checks.context.first_difference"),
    "patches_the_clock": ("bench", r"no time counts here: a callee replaces time.thread_time, torch.cuda.Event.elapsed_time"),
    "leaks": ("memory flat", r"leaks (0\.9|1\.)\d* MiB of host memory a call"),
    "last_bit": ("reruns bitwise equal", r"o of rerun \d+ on the same inputs: 1 of \d+ elements differ"),
    "ignores_flags": ("refusals", r"cu_seqlens: accepted and ignored"),
    "forgets_the_dtype": ("alternating shapes and dtypes", r"float16.*: o: (row error|NaN)"),
    "refuses_by_value": ("hostile: gates", r"refused by its values \(its shapes are accepted\)"),
    "shared_scratch": ("two threads at once", r"in thread \d of two at once, against a call alone: \d+ of \d+ elements differ"),
    "grows_with_shapes": ("many shapes", r"CALLS holds \d+ calls, accepted: 8"),
    "state_dropped": ("two halves", r"halves joined at token 64: .*row error"),
}  # fmt: skip
ALSO_BENCH = {  # those that would gain time are refused a time as well
    "cached_by_address": "old answer", "cached_by_shape": "input set 1", "first_call_only": "input set 1",
    "cached_when_warm": "after the rounds, new values in the same input tensors give an old answer",
}  # fmt: skip
ENTRIES = {"keeps_flas_stage": {"replaces": ["scan", "output"]}}


def test_there_is_a_line_for_every_rung():
    on_gpu = {"side_stream", "empty_capture", "current_stream"}  # test_gpu.py
    assert set(CAUGHT) | on_gpu | {"honest"} == {path.stem for path in RUNGS.glob("*.py")}
    assert len(CAUGHT) >= 20


@pytest.mark.parametrize("name", CAUGHT)
def test_naive_harness_accepts_it(cheat, name):
    """In a process of its own: a cheat may leave the settings of its process changed."""
    ladder = cheat(name, **ENTRIES.get(name, {}))
    with multiprocessing.get_context("fork").Pool(1) as pool:  # it has everything imported
        assert pool.apply(_naive, [ladder.folder(ladder.rung(2))])


def _naive(folder: Path, device: str = "cpu") -> bool:
    """Memory that nobody has written holds NaN for the rung that leaves some of its own unwritten: there luck would decide."""
    if "unwritten" in folder.name:
        torch.use_deterministic_algorithms(True, warn_only=True)  # it fills fresh memory
    return naive.accepts(load(folder).chunk_kda, device)


@pytest.mark.parametrize("name", [name for name, (by, _) in CAUGHT.items() if by != "bench"])
def test_check_rejects_it(cheat, name):
    by, message = CAUGHT[name]
    ladder = cheat(name, **ENTRIES.get(name, {}))
    rows = Run(ladder, [2], Options(properties=[by], cases=["tiny"], device="cpu", seed=7)).execute()
    failed = [row for row in rows if row["outcome"] == "failed"]
    assert failed, rows
    assert re.search(message, failed[0]["reason"]), failed[0]["reason"]


def test_honest_rung_is_accepted(cheat):
    """Everything that the cheats fail, the rung they are made of passes."""
    ladder = cheat("known_seed")
    properties = sorted({by for by, _ in CAUGHT.values()} - {"bench"})
    rows = Run(ladder, [1], Options(properties=properties, cases=["tiny"], device="cpu", seed=7)).execute()
    assert [row for row in rows if row["outcome"] != "passed"] == []


BENCH = {name: message for name, (by, message) in CAUGHT.items() if by == "bench"} | ALSO_BENCH


@pytest.mark.parametrize("name", BENCH)
def test_bench_gives_it_no_time(cheat, name, monkeypatch):
    import time

    clock, elapsed = time.thread_time, torch.cuda.Event.elapsed_time
    try:
        run = benching.Run(cheat(name), [2], benching.Options(seed=3, seconds=0.1, cases=["tiny"]), HostTimer(), gpu_cases=False)
        run.execute()
    finally:
        time.thread_time, torch.cuda.Event.elapsed_time = clock, elapsed
    assert run.records[0]["cells"] == [] and re.search(BENCH[name], run.failures[0]), run.failures


def test_bench_times_the_honest_rung(cheat):
    run = benching.Run(cheat("known_seed"), [1], benching.Options(seed=3, seconds=0.1, cases=["tiny"]), HostTimer(), gpu_cases=False)
    run.execute()
    assert run.failures == [] and len(run.records[0]["cells"]) == 1
