"""bench, timed by CPU time on CPU tensors: pairing, roles, records and refusals are those of a GPU run."""

from __future__ import annotations

import time

import pytest
import torch

from ladder import record as records
from ladder import rows, stats
from ladder.bench import MIN_ROUNDS, Callee, Options, Run, escaped_work
from ladder.timing import CaptureError, ReplayError, worst_row

BODY = "    io = p.io_dtype\n"
RETURN = '    return {"o": o, "final_state": S}\n'
CELL = {"cases": ["short"]}


class HostTimer:
    """This thread's CPU time in place of CUDA events (other processes do not show in it); nothing can be captured."""

    device = torch.device("cpu")

    def __init__(self):
        self.order = []

    def capture(self, call):
        raise CaptureError("the CPU has no graphs")

    def device_ms(self, run):
        begin = time.thread_time()
        run()
        return 1e3 * (time.thread_time() - begin)

    wall_ms = device_ms

    def launched(self, call):
        call()
        return []

    def copy_gbps(self):
        source = torch.ones(1 << 22)
        return 2 * source.nbytes / (self.device_ms(source.clone) * 1e-3) / 1e9

    def release(self):
        pass

    def describe(self):
        return {"name": "host", "arch": "cpu"}


def bench(ladder, numbers, **options):
    run = Run(ladder, numbers, Options(seed=3, seconds=0.1, **CELL, **options), HostTimer(), gpu_cases=False)
    run.execute()
    return run


def test_slower_rung_loses_and_copy_is_noise(forge):
    first = forge.rung("one")
    slow = forge.rung("slow", (BODY, BODY + "    import time; end = time.thread_time() + 0.03\n    while time.thread_time() < end: pass\n"), parent=first)
    run = bench(forge.ladder(), [first, slow], stages=True)
    own, slower = run.records
    assert run.failures == [] and own["complete"] and slower["complete"]
    assert rows.bench_rows(own)[0]["verdict"] == stats.NOISE  # its own parent
    row = rows.bench_rows(slower)[0]
    assert row["verdict"] == stats.LOSS and row["ratio_to_parent"] > 2
    assert stats.judge(slower["cells"])[1].verdict == stats.LOSS
    cell = slower["cells"][0]
    assert {len(times) for times in cell["samples_ms"].values()} == {len(cell["samples_ms"]["rung"])}
    assert len(cell["samples_ms"]["rung"]) >= MIN_ROUNDS
    assert cell["clocks"]["rung"] == "events" and cell["not_captured"]["rung"] == "the CPU has no graphs"
    assert cell["stages_ms"]["state"] > 30 and len(cell["stages_samples_ms"]["state"]) == MIN_ROUNDS


def test_samples_are_shared_between_rungs_of_one_command(forge):
    first = forge.rung("one")
    second = forge.rung("two", parent=first)
    third = forge.rung("three", parent=second)
    run = bench(forge.ladder(), [first, second, third])
    one, two, three = (r["cells"][0]["samples_ms"] for r in run.records)
    assert two["parent"] == one["rung"] and three["parent"] == two["rung"]
    assert one["parent"] == two["control"], "rung 1's second copy is rung 2's control"
    assert one["control"] != one["parent"] != one["rung"]


def test_rung_that_computes_something_else_is_not_timed(forge):
    first = forge.rung("one")
    skips = forge.rung("skips", (RETURN, "    o[:, 32:] = 0\n" + RETURN), parent=first)
    run = bench(forge.ladder(), [first, skips])
    assert len(run.records[0]["cells"]) == 1 and run.records[1]["cells"] == []
    assert "its answer is not that of the others" in run.failures[0] and "002-skips short/slow/pre" in run.failures[0]


def test_rung_that_remembers_its_answer_is_not_timed(forge):
    first = forge.rung("one")
    cached = forge.rung("cached", ("UNITS = ()\n", "UNITS = ()\nKEPT = {}\n"), (
        RETURN, "    o, S = KEPT.setdefault((p.B, p.T), (o, S))\n" + RETURN), parent=first)  # fmt: skip
    run = bench(forge.ladder(), [first, cached])
    assert run.records[1]["cells"] == [] and "input set 1" in run.failures[0]


def test_rung_that_remembers_by_address_is_not_timed(forge):
    first = forge.rung("one")
    cached = forge.rung("cached", ("UNITS = ()\n", "UNITS = ()\nKEPT = {}\n"), (
        RETURN, "    o, S = KEPT.setdefault(x['q'].data_ptr(), (o, S))\n" + RETURN), parent=first)  # fmt: skip
    run = bench(forge.ladder(), [first, cached])
    assert run.records[1]["cells"] == [] and "new values in the same input tensors give an old answer" in run.failures[0]
    assert len(run.records[0]["cells"]) == 1  # the inputs were put back


def test_graph_that_does_nothing_is_not_timed(forge):
    """An empty capture would replay in no time: the rung is refused, not timed another way."""

    class EmptyGraphs(HostTimer):
        def capture(self, call):
            raise ReplayError("graph replay does not do the call's work: 4096 elements are not written")

    first = forge.rung("one")
    run = Run(forge.ladder(), [first], Options(seed=3, **CELL), EmptyGraphs(), gpu_cases=False)
    run.execute()
    assert run.records[0]["cells"] == [] and "does not do the call's work" in run.failures[0]


def test_work_outside_the_events_is_seen():
    callee = Callee("x", None, None, samples=[0.01, 0.011, 0.01], eager=[1.0, 1.1, 1.2])
    assert "work escapes the events: 0.010 ms between them, 1.100 ms until the device is idle" == escaped_work(callee)
    callee.samples = [1.0, 1.05, 1.1]
    assert escaped_work(callee) is None


def test_finished_cells_survive_an_interrupt(forge):
    first = forge.rung("one")
    ladder = forge.ladder()
    run = Run(ladder, [first], Options(seed=3, seconds=0.1, forms=["pre"]), HostTimer(), gpu_cases=False)

    def interrupt(cell, note):
        if len(run.records[0]["cells"]) == 2:
            raise KeyboardInterrupt

    run.on_cell = interrupt
    with pytest.raises(KeyboardInterrupt):
        run.execute()
    kept = records.read(run.paths[0])
    assert len(run.cells) == 3 and len(kept["cells"]) == 2 and kept["complete"] is False


def test_records_go_where_asked(forge, tmp_path):
    first = forge.rung("one")
    run = bench(forge.ladder(), [first], records_dir=tmp_path / "out")
    assert [p.parent for p in run.paths] == [tmp_path / "out"]
    assert records.read(run.paths[0])["rung"] == "001-one"


def test_worst_row_sees_one_row_and_nan():
    a = torch.randn(4, 64, 8)
    b = a.clone()
    assert worst_row([a], [b]) == 0
    b[2, 5] += 1
    assert 0.9 < worst_row([b], [a]) < 1.1
    b[2, 5, 0] = torch.nan
    assert worst_row([b], [a]) == float("inf")
    assert worst_row([a], [a, a]) == float("inf")
