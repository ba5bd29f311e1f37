"""The best rung per cell and the means of the bar, from records; the rule that picks a rung for a problem."""

from __future__ import annotations

import io
import json
import math
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

from kernels.kda.contract import Problem
from ladder import best, noted, report, report_terminal

PROJECT = Path(__file__).resolve().parents[2]
STATES = {"statuses": ["current", "won", "falsified", "won", "draft", "won"], "stale": {4}, "failing": {6}}


def printed(standing) -> str:
    text = io.StringIO()
    report_terminal.best_tables(standing, Console(file=text, width=200))
    return text.getvalue()


def test_the_best_is_the_fastest_current_rung_that_counts(made):
    ladder, _, records, stale = made(**STATES)
    standing = best.standing(records, ladder, stale)
    assert len(standing["cells"]) == 7 * 4 * 2, "every cell of ladder.yaml, timed or not"
    timed = [c for c in standing["cells"] if c["rung"]]
    assert {c["rung"] for c in timed} == {2} and len(timed) == 36
    table = {(r["rung"], r["case"], r["regime"], r["form"]): r for r in report.rows(records, ladder, stale)}
    for c in timed:
        row = table[2, c["case"], c["regime"], c["form"]]
        assert c["median_ms"] == row["median_ms"] == statistics.median(samples(records, 2, c)["rung"])
        assert c["best_rival_ms"] == min(rivals_by_hand(records, 2, c).values()) == row["rivals"][c["best_rival"]]
        assert c["speedup"] == c["best_rival_ms"] / c["median_ms"] and c["why"] is None
    untimed = next(c for c in standing["cells"] if (c["case"], c["regime"]) == ("h64", "init"))
    assert untimed["rung"] is untimed["median_ms"] is untimed["speedup"] is None and untimed["why"] == "never timed"
    assert json.loads(json.dumps(standing)) == standing


def samples(records, number, cell, kind="samples_ms"):
    (record,) = (r for r in records if r["kind"] == "bench" and r["number"] == number)
    key = [cell[k] for k in ("case", "regime", "form")]
    return next(c[kind] for c in record["cells"] if [c[k] for k in ("case", "regime", "form")] == key)


def rivals_by_hand(records, number, cell):
    """Median of every rival of a run, and the two that are scaled from the table by fla's eager time (prod only)."""
    times = {n: statistics.median(t) for n, t in samples(records, number, cell).items() if n not in ("rung", "parent", "control")}
    row = noted.MS.get((cell["case"], cell["regime"]))
    if cell["form"] == "prod" and row:
        ratio = statistics.median(samples(records, number, cell, "eager_ms")["fla-safe"]) / row[0]
        times |= {"FlashKDA": row[1] * ratio, "cuLA": row[2] * ratio}
    return times


def test_rivals_of_the_table_are_scaled_by_flas_eager_time(made):
    ladder, _, records, stale = made(statuses=["current"])
    (record,) = (r for r in records if r["kind"] == "bench")
    cells = {(c["case"], c["regime"], c["form"]): c for c in record["cells"]}
    cell = cells["h96", "slow", "prod"] | {"eager_ms": {"fla-safe": [5.0, 5.396, 99.0], "fla": [1.0]}}
    assert noted.rivals(record, cell) == pytest.approx({"FlashKDA": 3.052, "cuLA": 3.606})
    row = next(r for r in report.rows([record | {"cells": [cell]}], ladder, stale))
    assert (row["rivals"]["FlashKDA"], row["rival_clocks"]["FlashKDA"]) == (pytest.approx(3.052), "noted")
    assert row["rivals"]["fla"] == statistics.median(cell["samples_ms"]["fla"])
    for other in (("h96", "slow", "pre"), ("h96", "mixed", "prod"), ("train", "slow", "prod")):
        assert noted.rivals(record, cells[other]) == {}
    assert noted.rivals(record | {"device": {"name": "NVIDIA H100"}}, cell) == {}
    assert noted.rivals(record, cell | {"eager_ms": {"fla": [1.0]}}) == noted.rivals(record, cell | {"eager_ms": {}}) == {}


def test_where_nothing_is_current_it_says_so(made):
    ladder, _, records, stale = made(statuses=["current", "won", "draft", "won"], stale={1, 2}, failing={4})
    standing = best.standing(records, ladder, stale)
    assert not any(c["rung"] for c in standing["cells"])
    cell = next(c for c in standing["cells"] if (c["case"], c["regime"], c["form"]) == ("h96", "slow", "prod"))
    assert cell["why"] == "001 is stale, 002 is stale, 003 is a draft, 004 is failing a check"
    assert [(m["speedup"], m["cells"], m["of"]) for m in standing["means"]] == [(None, 0, 12), (None, 0, 6)]
    text = printed(standing)
    assert "nothing current: 001 is stale, 002 is stale" in text and "x over" not in text
    assert "geometric mean, prod, strong and slow: none of 12 cells has a current time and a rival" in text


def test_an_empty_ladder_has_no_best(made):
    ladder, _, records, stale = made(statuses=[])
    standing = best.standing(records, ladder, stale)
    assert standing == {"cells": [], "means": []} and "No timing recorded yet" in printed(standing)


def test_the_means_are_over_the_twelve_cells_and_the_six(made):
    ladder, _, records, stale = made(statuses=["current", "won"])
    standing = best.standing(records, ladder, stale)
    by_hand = {}
    for case in ("t2048_h12", "t8192_h24", "h64", "h96", "b8_h16_t4096", "t32768_h32"):
        for regime in ("strong", "slow"):
            cell = {"case": case, "regime": regime, "form": "prod"}
            ours = statistics.median(samples(records, 2, cell)["rung"])
            by_hand[case, regime] = min(rivals_by_hand(records, 2, cell).values()) / ours
    both, slow = standing["means"]
    assert (both["cells"], both["of"], slow["cells"], slow["of"]) == (12, 12, 6, 6)
    assert both["speedup"] == pytest.approx(math.prod(by_hand.values()) ** (1 / 12))
    assert slow["speedup"] == pytest.approx(math.prod(s for (_, g), s in by_hand.items() if g == "slow") ** (1 / 6))
    text = printed(standing)
    assert f"geometric mean, prod, slow: {slow['speedup']:.2f}x over 6 of 6 cells" in text
    clocks = {c["best_rival"]: c["same_clock"] for c in standing["cells"] if c["rung"]}
    assert clocks["FlashKDA"] is False and clocks["cudnn:kda_hopper_cuda"] is True
    lines = [line for line in text.splitlines() if "FlashKDA" in line or "cudnn" in line]
    assert all(("*" in line) == ("FlashKDA" in line) for line in lines) and "* by another clock" in text


def test_a_missing_cell_is_missing_from_the_mean(made):
    ladder, _, records, stale = made(statuses=["current"])
    records = [r if r["kind"] != "bench" else r | {"cells": [c for c in r["cells"] if c["case"] != "h96"]} for r in records]
    both, slow = best.standing(records, ladder, stale)["means"]
    assert (both["cells"], both["of"], slow["cells"], slow["of"]) == (10, 12, 5, 6)


def test_the_command_prints_it(rungs):
    """In a process of its own, from records on disk: one that is current, and one whose code has changed."""
    rungs.add()
    rungs.time(1, {("tiny", "slow", "prod"): 2.0})
    env = {**os.environ, "PYTHONPATH": str(PROJECT)}
    command = [sys.executable, "-m", "ladder", "best", "--json", "--root", str(rungs.root)]
    found = json.loads(subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout)
    slow = next(c for c in found["cells"] if (c["regime"], c["form"]) == ("slow", "prod"))
    assert (slow["rung"], slow["median_ms"], slow["best_rival"], slow["precision"]) == (1, 2.0, None, None)
    kernel = rungs.root / "ideas" / "001-rung-1" / "kernel.py"
    kernel.write_text(kernel.read_text() + "# changed\n")
    done = subprocess.run(command[:4] + command[5:], env=env, capture_output=True, text=True, check=True)
    assert "nothing current: 001 is stale" in done.stdout


def test_make_best_runs_it():
    done = subprocess.run(["make", "-n", "best"], cwd=PROJECT, capture_output=True, text=True, check=True)
    assert "python -m ladder best" in done.stdout


def problem(T=8192, HV=96, B=1, K=128, V=128, gate="safe", safe=True) -> Problem:
    return Problem(B, T, HV, HV, K, V, {"q": torch.bfloat16}, torch.device("cpu"), 1.0,
                   gate, None, safe, True, True, False, True)  # fmt: skip


def timed(rung, case, ms, regimes=("strong", "slow"), form="prod", device="NVIDIA H200", arch="sm_90a", **shape):
    """Times of one rung at a case, in every regime (ms: one for all of them, or one each)."""
    sizes = {"B": 1, "T": 8192, "HV": 96, "K": 128, "V": 128} | shape
    each = ms if isinstance(ms, tuple) else (ms,) * len(regimes)
    return [best.Timed(rung, device, arch, case, regime, form, sizes, t) for regime, t in zip(regimes, each)]


def picked(p, times, eligible=(1, 2, 3), device="NVIDIA H200"):
    return best.pick(p, "sm_90a", device, eligible, sum(times, []))


def test_the_nearest_case_decides():
    times = [timed(1, "h96", 1.0), timed(2, "h96", 2.0), timed(1, "few", 2.0, T=2048, HV=12), timed(2, "few", 1.0, T=2048, HV=12)]
    assert picked(problem(), times)[0] == 1 and "1 ms (strong and slow, prod) at h96 on NVIDIA H200" in picked(problem(), times)[1]
    assert picked(problem(T=8192, HV=64), times)[0] == 1
    assert picked(problem(T=1024, HV=8), times)[0] == 2
    assert picked(problem(T=4096, HV=33), times)[0] == 2, "half way in T, and three heads nearer to few"
    assert picked(problem(T=4096, HV=12, B=8), times)[0] == 1, "B x HV counts, not HV"


def test_head_dimensions_count_as_distance():
    times = [timed(1, "square", 1.0), timed(2, "square", 2.0), timed(1, "wide", 2.0, V=256), timed(2, "wide", 1.0, V=256)]
    assert picked(problem(), times)[0] == 1 and picked(problem(V=256), times)[0] == 2


def test_both_regimes_count_by_their_geometric_mean():
    assert picked(problem(), [timed(1, "h96", (1.0, 9.0)), timed(2, "h96", (2.0, 4.0))])[0] == 2
    assert picked(problem(), [timed(1, "h96", (1.0, 7.0)), timed(2, "h96", (2.0, 4.0))])[0] == 1
    only_strong = timed(1, "h96", 0.1, regimes=("strong",))
    assert picked(problem(), [only_strong, timed(2, "h96", 2.0)])[0] == 2, "a rung timed in one regime has no time there"


def test_gate_kinds_are_not_mixed():
    times = [timed(1, "h96", 1.0), timed(2, "h96", 2.0), timed(1, "h96", 2.0, ("init",)), timed(2, "h96", 1.0, ("init",)),
             timed(1, "h96", 2.0, form="pre"), timed(2, "h96", 1.0, form="pre")]  # fmt: skip
    assert picked(problem(), times)[0] == 1
    assert picked(problem(gate="softplus", safe=False), times)[0] == 2
    assert picked(problem(gate="log"), times)[0] == 2
    number, why = picked(problem(gate="log", safe=False), times)
    assert number == 3 and why.startswith("the highest-numbered rung"), "no time of form pre with unbounded gates"


def test_only_eligible_rungs_and_this_architecture_count():
    times = [timed(3, "h96", 0.1, arch="sm_100a", device="NVIDIA B200"), timed(1, "h96", 1.0), timed(2, "h96", 2.0)]
    assert picked(problem(), times)[0] == picked(problem(), times, device="NVIDIA H20")[0] == 1
    assert picked(problem(), times, eligible=(2, 3))[0] == 2
    assert picked(problem(), [], eligible=(2, 3))[0] == 3


def test_records_of_this_device_come_before_others_of_its_architecture():
    times = [timed(1, "h96", 1.0), timed(2, "h96", 2.0), timed(1, "h96", 2.0, device="NVIDIA H100"),
             timed(2, "h96", 1.0, device="NVIDIA H100")]  # fmt: skip
    assert picked(problem(), times)[0] == 1 and picked(problem(), times, device="NVIDIA H100")[0] == 2
    number, why = picked(problem(), times, device="NVIDIA H20")
    assert number == 1 and "on NVIDIA H200" in why
