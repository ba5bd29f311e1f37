"""What only a GPU can show: events, graphs, streams, the profiler, device memory. Rungs are plain torch on CUDA tensors."""

from __future__ import annotations

import contextlib
import re

import pytest
import torch
import triton
import triton.language as tl

from ladder import rows, stats, timing, witness
from ladder.bench import MIN_ROUNDS, Run, cuda_timer
from ladder.bench import Options as BenchOptions
from ladder.check import Options
from ladder.check import Run as CheckRun

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

BODY = "    io = p.io_dtype\n"
RETURN = '    return {"o": o, "final_state": S}\n'
UNITS = "UNITS = ()\n"
HOPS, APART = 4096, 256  # int32 apart: 1 KiB, so that no hop finds its cache line fetched by another


@triton.jit
def follow(next_, last, HOPS: tl.constexpr):
    """Each load waits for the one before: time is latency, which cache and memory differ in by a factor."""
    at = tl.load(next_)
    for _ in range(HOPS):
        at = tl.load(next_ + at)
    tl.store(last, at)


@pytest.fixture(scope="module")
def timer():
    return cuda_timer()


def test_copy_rate_and_device_time_agree(timer):
    rate = timer.copy_gbps()
    assert 500 < rate < 20000
    source = torch.ones(1 << 29, dtype=torch.uint8, device=timer.device)
    target = torch.empty_like(source)
    ms = min(timer.device_ms(lambda: target.copy_(source)) for _ in range(5))
    assert ms == pytest.approx(2 * source.numel() / rate / 1e6, rel=0.2)


def test_flush_makes_the_cache_cold(timer):
    """4 MiB visited again at once come from the cache, after a flush from memory."""
    order = torch.cat([torch.zeros(1, dtype=torch.int64), 1 + torch.randperm(HOPS - 1)]) * APART
    next_ = torch.zeros(HOPS * APART, dtype=torch.int32)
    next_[order] = order.roll(-1).int()
    next_, last = next_.to(timer.device), torch.zeros(1, dtype=torch.int32, device=timer.device)

    def visit():
        follow[(1,)](next_, last, HOPS=HOPS, num_warps=1)
        return last * 1.0

    read = timer.capture(visit)
    cold = sorted(timer.device_ms(read) for _ in range(15))[7]
    flush, timer.flush = timer.flush, lambda: None
    try:
        warm = sorted(timer.device_ms(read) for _ in range(15))[7]
    finally:
        timer.flush = flush
    assert warm < 0.75 * cold


def test_graph_replay_is_the_call(timer):
    a, b = torch.randn(2, 1 << 20, device=timer.device)
    replay = timer.capture(lambda: a + b)
    assert timer.device_ms(replay) > 0


def test_captures_share_memory(timer):
    a = torch.randn(1 << 26, device=timer.device)
    before = torch.cuda.memory_reserved()
    kept = [timer.capture(lambda: (a * 2) + 1) for _ in range(12)]
    assert torch.cuda.memory_reserved() - before < 16 * a.nbytes and len(kept) == 12


def test_dishonest_captures_are_refused(timer):
    a = torch.randn(1 << 16, device=timer.device)
    kept, side = a + 1, torch.cuda.Stream()

    def elsewhere():
        with torch.cuda.stream(side):
            return a + 1

    def waits():
        torch.cuda.synchronize()
        return a + 1

    def switches():
        if torch.cuda.is_current_stream_capturing():
            other = torch.cuda.Stream()
            other.wait_stream(torch.cuda.current_stream())
            torch.cuda.set_stream(other)
        return a + 1

    def captures():
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            return a + 1

    def draws_and_waits():
        drawn = torch.rand(8, device=timer.device)
        torch.cuda.synchronize()
        return drawn * 0

    def fails():
        if torch.cuda.is_current_stream_capturing():
            raise ValueError("not now")
        return a + 1

    with pytest.raises(timing.ReplayError, match="65536 elements are not written"):
        timer.capture(lambda: kept)
    kept = a + 1
    before = torch.cuda.current_stream()
    older = timer.capture(lambda: a + 1)
    for call in (elsewhere, waits, switches, captures, draws_and_waits, fails):
        with pytest.raises(timing.CaptureError):
            timer.capture(call)
        assert torch.cuda.current_stream() == before and not torch.cuda.is_current_stream_capturing()
        torch.rand(1, device=timer.device)
        assert timer.device_ms(older) > 0 and timer.device_ms(timer.capture(lambda: a + 1)) > 0, f"the timer works after {call.__name__}"


def test_a_refused_capture_may_be_the_first():
    """No graph keeps the pool then."""
    timer = cuda_timer()
    a = torch.ones(1 << 10, device=timer.device)
    kept = a + 1
    for _ in range(2):
        with pytest.raises(timing.ReplayError):
            timer.capture(lambda: kept)
        kept = a + 1
    torch.rand(1, device=timer.device)
    assert timer.device_ms(timer.capture(lambda: a + 1)) > 0
    timer.release()
    assert timer.device_ms(timer.capture(lambda: torch.rand(8, device=timer.device) * 0)) > 0


def test_a_capture_that_could_not_begin_is_abandoned_too(timer):
    a, stream, pool = torch.ones(8, device=timer.device), torch.cuda.Stream(), torch.cuda.graph_pool_handle()
    older = timer.capture(lambda: a + 1)
    with torch.cuda.stream(stream):
        last = torch.cuda.CUDAGraph()
        last.capture_begin(pool=pool)
        a.add_(0)
        last.capture_end()
        del last
        graph = torch.cuda.CUDAGraph()
        with contextlib.suppress(RuntimeError):  # the pool's last graph is gone; other versions of torch may take it
            graph.capture_begin(pool=pool)
    timing.abandon(graph, stream)
    torch.rand(1, device=timer.device)
    assert timer.device_ms(older) > 0 and timer.device_ms(timer.capture(lambda: a + 1)) > 0


def test_witness_names_kernels():
    x = torch.randn(256, 256, device="cuda", dtype=torch.bfloat16)
    launched = witness.on_gpu(lambda: (x @ x).add_(1))
    assert any("elementwise" in name for name in launched)
    foreign = witness.unnamed([], launched)
    assert len(foreign) == 1 and witness.complaint(["kda_state"], launched).startswith("named kernels never launched: kda_state")
    assert witness.complaint([foreign[0][:20]], launched) is None


FAULTS = {
    "side-stream": ((RETURN, "    side = torch.cuda.Stream()\n    with torch.cuda.stream(side):\n        o = o.clone()\n" + RETURN),
                    "second stream", r"on a second stream"),
    "waits": ((BODY, BODY + "    torch.cuda.synchronize()\n"), "second stream", r"waits for the device inside the call"),
    "uncapturable": ((BODY, BODY + "    float(x['beta'].sum())\n"), "CUDA graph", r"cannot be captured in a CUDA graph"),
    "remembers": ((RETURN, "    o, S = KEPT.setdefault((p.T, io), (o, S))\n" + RETURN), "CUDA graph", r"the captured graph does not write o"),
    "leaks": ((BODY, BODY + '    KEPT.setdefault("leak", []).append(torch.ones(1 << 18, device=x["q"].device))\n'),
              "memory flat", r"leaks 1048576 bytes of device memory a call"),
    "last-row": (("        o[:, rows] = out.transpose(1, 2).to(io)\n",
                  "        n = out.shape[2] - (start + CHUNK >= p.T)\n"
                  "        o[:, start : start + n] = out[:, :, :n].transpose(1, 2).to(io)\n"),
                 "every row written", r"rows still hold the poison"),
    "names-what-never-ran": (('Stage("state", (),', 'Stage("state", ("kda_state",),'), "kernels launched", r"never launched: kda_state"),
}  # fmt: skip


def checked(forge, number, properties):
    options = Options(properties=properties, cases=["tiny"], regimes=["slow"], forms=["pre"], seed=7)
    return {row["property"]: row for row in CheckRun(forge.ladder(), [number], options).execute()}


def arch():
    return timing.device_arch(torch.device("cuda"))


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_caught(forge, fault):
    edit, prop, message = FAULTS[fault]
    number = forge.rung(fault, edit, (UNITS, UNITS + "KEPT = {}\n"), arch=arch())
    row = checked(forge, number, [prop])[prop]
    assert row["outcome"] == "failed" and re.search(message, row["reason"]), row


def test_correct_rung_passes(forge):
    """All but the witness: torch's own matrix products are kernels that no stage names. Two are not run: the emulator
    watches no rung on a GPU, and there a call returns before its kernels have run. A second device needs one."""
    got = checked(forge, forge.rung("right", arch=arch()), [])
    others = {p: (row["outcome"], row["reason"]) for p, row in got.items() if row["outcome"] != "passed"}
    if torch.cuda.device_count() == 1:
        assert others.pop("second device")[0] == "not run"
    assert {p: outcome for p, (outcome, _) in others.items()} == {
        "kernels launched": "failed", "emulated: no findings": "not run", "finished when returned": "not run"}, others  # fmt: skip


def test_lost_device_spares_the_next_property(forge):
    crash = "    if io == torch.float16: torch.zeros(4, device=x['q'].device)[torch.full((4,), 9, device=x['q'].device)]\n"
    got = checked(forge, forge.rung("assert", (BODY, BODY + crash), arch=arch()), ["alternating shapes and dtypes", "refusals", "causality"])
    assert {p: row["outcome"] for p, row in got.items()} == {
        "alternating shapes and dtypes": "failed", "refusals": "passed", "causality": "passed"}  # fmt: skip


def test_architectures_of_other_gpus_are_not_run(forge):
    other = "sm_100a" if arch() == "sm_90a" else "sm_90a"
    row = checked(forge, forge.rung("other", arch=other), ["refusals"])["refusals"]
    assert row["outcome"] == "not run" and f"this machine's GPU is {arch()}" in row["reason"]


def test_bench_by_graph_replay(forge, timer):
    first = forge.rung("one", arch=arch())
    second = forge.rung("slow", (RETURN, "    for _ in range(8): S = (S + 1) - 1\n" + RETURN), parent=first, arch=arch())
    options = BenchOptions(cases=["tiny"], regimes=["slow"], forms=["pre"], seed=3, seconds=0.2, stages=True)
    run = Run(forge.ladder(), [first, second], options, timer, gpu_cases=False)
    run.execute()
    assert run.failures == []
    own, slower = run.records
    cell = own["cells"][0]
    assert cell["clocks"] == {"rung": "graph", "parent": "graph", "control": "graph"}, cell["not_captured"]
    assert len(cell["samples_ms"]["rung"]) >= MIN_ROUNDS and cell["telemetry"]["sm_mhz"] and cell["launches"]["rung"]
    assert cell["stages_ms"]["state"] > 0 and cell["floor_ms"] < cell["samples_ms"]["rung"][0]
    assert rows.bench_rows(own)[0]["verdict"] == stats.NOISE and rows.bench_rows(slower)[0]["verdict"] == stats.LOSS
