import copy
import json
import statistics
from datetime import timedelta

import pytest

from ladder import record as record_module
from ladder import report
from tests.report.synthetic import NOW

KEYS = {
    "rung",
    "case",
    "regime",
    "form",
    "arch",
    "device",
    "clock",
    "median_ms",
    "floor_ms",
    "ratio_to_parent",
    "interval",
    "verdict",
    "stale",
    "rivals",
    "date",
}


@pytest.fixture(scope="module")
def two(made):
    return made(statuses=["current", "won"])


def bench_of(records, number):
    return next(r for r in records if r["kind"] == "bench" and r["number"] == number)


def later(record, **changes):
    newer = copy.deepcopy(record) | changes
    newer["date"] = (report._date(record) + timedelta(hours=1)).isoformat()
    return newer


def test_a_row_has_what_scripts_ask_for_and_is_json(two):
    ladder, _, records, stale = two
    table = report.rows(records, ladder, stale)
    assert len(table) == 2 * 36
    for row in table:
        assert KEYS <= row.keys()
    assert json.loads(json.dumps(table)) == table


def test_figures_come_from_the_samples(two):
    ladder, _, records, stale = two
    row = next(
        r
        for r in report.rows(records, ladder, stale)
        if (r["rung"], r["case"], r["regime"], r["form"]) == (2, "h96", "slow", "pre")
    )
    cell = next(
        c for c in bench_of(records, 2)["cells"] if (c["case"], c["regime"], c["form"]) == ("h96", "slow", "pre")
    )
    ours, parent = cell["samples_ms"]["rung"], cell["samples_ms"]["parent"]
    assert row["median_ms"] == statistics.median(ours)
    assert row["ratio_to_parent"] == pytest.approx(statistics.median(a / b for a, b in zip(ours, parent, strict=True)))
    assert row["interval"][0] <= row["ratio_to_parent"] <= row["interval"][1]
    assert row["verdict"] == "win"
    best = min(
        (statistics.median(v), n) for n, v in cell["samples_ms"].items() if n not in ("rung", "parent", "control")
    )
    assert (row["best_rival_ms"], row["best_rival"]) == best
    assert row["speedup"] == pytest.approx(best[0] / row["median_ms"])


def test_a_rival_by_another_clock_is_marked(two):
    ladder, _, records, stale = two
    records = copy.deepcopy(records)
    for cell in bench_of(records, 2)["cells"]:
        cell["samples_ms"]["fla"] = [x / 10 for x in cell["samples_ms"]["rung"]]
    mine = [r for r in report.rows(records, ladder, stale) if r["rung"] == 2]
    assert {(r["best_rival"], r["same_clock"]) for r in mine} == {("fla", False)}


def test_the_newest_current_record_speaks_cell_by_cell(two):
    ladder, _, records, stale = two
    first = bench_of(records, 1)
    newer = later(first, cells=copy.deepcopy(first["cells"][:1]))
    newer["cells"][0]["samples_ms"]["rung"] = [9.0] * 15
    table = [r for r in report.rows([*records, newer], ladder, stale) if r["rung"] == 1]
    assert len(table) == 36
    assert [r["median_ms"] for r in table if r["date"] == newer["date"]] == [9.0]


def test_a_stale_record_yields_to_an_older_current_one_and_shows_alone(two):
    ladder, _, records, _ = two
    first = bench_of(records, 1)
    newer = later(first, code_hash="feed")
    why = lambda r: "changed" if r["code_hash"] == "feed" else None  # noqa: E731
    assert not any(r["stale"] for r in report.rows([*records, newer], ladder, why))
    only = report.rows([newer], ladder, why)
    assert all(r["stale"] and r["stale_reason"] == "changed" for r in only)
    assert report.best(only, ladder) == {} and report.overall([newer], ladder, why) == {}


def test_staleness_by_default_is_the_records_own(two):
    """The synthetic hashes match no file, so everything is stale until the hash is the real one."""
    ladder, _, records, _ = two
    assert all(r["stale"] for r in report.rows(records, ladder))
    own, parent = record_module.code_hashes(ladder, ladder.rung(1))
    real = copy.deepcopy(bench_of(records, 1)) | {"code_hash": own, "parent_hash": parent}
    from ladder.timing import TIMING_VERSION

    real["timing_version"] = TIMING_VERSION
    assert not any(r["stale"] for r in report.rows([real], ladder))


def test_best_leaves_out_drafts_falsified_stale_and_failing(made):
    ladder, plan, records, stale = made(
        statuses=["current", "won", "falsified", "won", "draft", "won"], stale={4}, failing={6}
    )
    table = report.rows(records, ladder, stale)
    checks = report.check_rows(records, ladder, stale)
    assert report.failing_rungs(checks) == {6}
    assert {r["rung"] for r in report.best(table, ladder, report.failing_rungs(checks)).values()} == {2}
    assert {r["rung"] for r in report.best(table, ladder).values()} == {6}


def test_devices_are_kept_apart(made):
    ladder, _, records, stale = made(
        statuses=["current", "won"], devices=[("NVIDIA H200", "sm_90a"), ("NVIDIA B200", "sm_100a")]
    )
    table = report.rows(records, ladder, stale)
    assert report.devices(table) == ["NVIDIA B200", "NVIDIA H200"]
    assert len(table) == 2 * 2 * 36 and len(report.best(table, ladder)) == 2 * 36
    assert {(r["device"], r["arch"]) for r in table} == {("NVIDIA H200", "sm_90a"), ("NVIDIA B200", "sm_100a")}


def test_without_rivals_nothing_is_claimed(made):
    ladder, _, records, stale = made(statuses=["current"], rivals=False)
    for row in report.rows(records, ladder, stale):
        assert row["rivals"] == {} and row["speedup"] is None and row["absent"]["fla"] == "package not installed"
    assert report.rung_summaries(records, ladder, stale)[0]["speedup"] == {"prod": None, "pre": None}


def test_an_empty_ladder_has_no_rows(made):
    ladder, _, records, stale = made(statuses=[])
    assert report.rows(records, ladder, stale) == [] == report.check_rows(records, ladder, stale)


def test_checks_fail_if_one_run_failed_and_not_run_is_not_passed(two):
    ladder, _, records, stale = two
    records = copy.deepcopy(records)
    gpu = next(r for r in records if r["kind"] == "check" and r["number"] == 1 and r["device"]["name"] == "NVIDIA H200")
    gpu["rows"].append(gpu["rows"][0] | {"outcome": "failed", "reason": "row 3 is off by 0.2", "regime": "strong"})
    rows = {(c["rung"], c["device"], c["property"]): c for c in report.check_rows(records, ladder, stale)}
    bad = rows[1, "NVIDIA H200", "oracle"]
    assert bad["outcome"] == "failed" and bad["runs"] == {"passed": 1, "failed": 1, "not run": 0}
    assert bad["reasons"] == ["h96/strong/prod: row 3 is off by 0.2"]
    assert rows[1, "CPU (emulated)", "memory flat"]["outcome"] == "not run"
    assert rows[2, "NVIDIA H200", "oracle"]["outcome"] == "passed"


def test_a_later_check_that_did_not_run_a_property_does_not_hide_its_result(two):
    ladder, _, records, stale = two
    old = next(r for r in records if r["kind"] == "check" and r["number"] == 1 and r["device"]["name"] == "NVIDIA H200")
    skipped = later(old, rows=[old["rows"][0] | {"outcome": "not run", "reason": "not asked"}])
    rows = report.check_rows([old, skipped], ladder, stale)
    assert {c["property"]: c["outcome"] for c in rows}["oracle"] == "passed"


def test_a_cell_that_could_not_be_timed_is_told_until_it_could(two):
    ladder, _, records, stale = two
    first = bench_of(records, 2)
    cell = {"case": "h96", "regime": "slow", "form": "prod", "reason": "disagrees with its parent"}
    broken = later(first, cells=[], failed=[cell])
    told = report.untimed([*records, broken], ladder, stale)
    assert [(u["rung"], u["device"], u["reason"]) for u in told] == [(2, "NVIDIA H200", "disagrees with its parent")]
    assert report.untimed([*records, broken, later(broken, cells=first["cells"], failed=[])], ladder, stale) == []
    assert report.untimed([broken], ladder, lambda _: "changed") == []


def test_unreadable_records_are_named(made, tmp_path):
    from tests.report.synthetic import Plan, make

    ladder = make(tmp_path, Plan(["current"]))
    (ladder.folder(ladder.rung(1)) / "records" / "bench-broken.json").write_text('{"schema": 1')
    records, problems = report.load(ladder)
    assert (
        len(records) == 3
        and len(problems) == 1
        and problems[0].startswith("001-rung-a: bench-broken.json: corrupt record")
    )


def test_age():
    ago = lambda **k: report.age((NOW - timedelta(**k)).isoformat(), NOW)  # noqa: E731
    assert [ago(minutes=5), ago(hours=3), ago(hours=47), ago(days=12), ago(days=-1)] == [
        "5 min",
        "3 h",
        "47 h",
        "12 d",
        "0 min",
    ]


def test_hostile_cases_are_summed_in_the_rungs_row(two):
    ladder, _, records, stale = two
    records = copy.deepcopy(records)
    gpu = next(r for r in records if r["kind"] == "check" and r["number"] == 1 and r["device"]["name"] == "NVIDIA H200")
    tallies = ({"passed": 40, "refused": 0, "inherited": 2, "failed": 0}, {"passed": 9, "refused": 3, "inherited": 0, "failed": 0})
    for name, tally in zip(("hostile: gates", "hostile: sizes"), tallies):
        gpu["rows"].append(gpu["rows"][0] | {"property": name, "outcome": "passed", "reason": "", "hostile": tally})
    first, second = (next(s for s in report.rung_summaries(records, ladder, stale) if s["rung"] == n) for n in (1, 2))
    assert first["hostile"] == {"passed": 49, "refused": 3, "inherited": 2, "failed": 0} and second["hostile"] is None
