"""What the committed records say, as rows: the newest current measurement of every cell, else the newest stale one.

Everything here is a pure function of records and ladder.yaml; terminal, page and README only lay these rows out.
A ratio is time over the parent's time (below 1 is faster); a speed-up is the best rival's time over ours (above 1 is
faster). Nothing is averaged across forms or devices, and a stale row is never part of an average or of a best.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from datetime import datetime
from pathlib import Path
from typing import Any

from ladder import record as record_module
from ladder import stats
from ladder.manifest import FORMS, REGIMES, ROOT, Ladder, Rung
from ladder.rows import bench_rows, precision_row, sum_hostile

Record = dict[str, Any]
Row = dict[str, Any]
Stale = Callable[[Record], "str | None"]
BAR_STATUS = ("current", "won")  # rungs that may be the best one; a draft or a falsified rung never is


def load(ladder: Ladder) -> tuple[list[Record], list[str]]:
    """(every readable record of every rung, oldest first, each with its `file`; one line per unreadable one)."""
    records, problems = [], []
    for rung in ladder.rungs.values():
        for path in sorted((ladder.folder(rung) / "records").glob("*.json")):
            try:
                records.append({**record_module.read(path), "file": path.relative_to(ladder.root).as_posix()})
            except record_module.RecordError as error:
                problems.append(f"{rung.name}: {error}")
    return sorted(records, key=_date), problems


def rows(records: Sequence[Record], ladder: Ladder, stale: Stale | None = None) -> list[Row]:
    """One row per (rung, device, case, regime, form), in the ladder's order; `precision`: its row of `precision`, or None.

    stale: why a record no longer speaks for its rung (None if it does); by default from the files as they are now.
    """
    judged: dict[int, list[Row]] = {}
    found = {_key(r): r for r in precision(records, ladder, stale)}
    out = []
    for rec, index, why in newest(records, "bench", "cells", ladder, stale):
        if id(rec) not in judged:
            judged[id(rec)] = bench_rows(rec, why)
        row = judged[id(rec)][index]
        out.append(row | _more(rec, rec["cells"][index], ladder) | _against_rivals(row) | {"precision": found.get(_key(row))})
    return sorted(out, key=lambda row: _order(row, ladder))


def precision(records: Iterable[Record], ladder: Ladder, stale: Stale | None = None) -> list[Row]:
    """One row (ladder.rows.precision_row) per (rung, device, case, regime, form), in the ladder's order."""
    out = [precision_row(rec, rec["precision"][index], why) | {"file": rec.get("file")}
           for rec, index, why in newest(records, "precision", "precision", ladder, stale)]  # fmt: skip
    return sorted(out, key=lambda row: _order(row, ladder))


def newest(
    records: Iterable[Record], kind: str, cells: str, ladder: Ladder, stale: Stale | None = None
) -> list[tuple[Record, int, str | None]]:
    """(record, index into its list `cells`, why it is stale) of what speaks for each rung, device and cell: the newest
    current measurement, else the newest stale one."""
    why = _stale_once(stale or (lambda r: record_module.stale(r, ladder)))
    chosen: dict[tuple, tuple[Record, int, str | None]] = {}
    for rec in sorted(_of_kind(records, kind, ladder), key=lambda r: (why(r) is None, _date(r))):
        for index, cell in enumerate(rec[cells]):
            key = (rec["number"], rec["device"].get("name"), cell["case"], cell["regime"], cell["form"])
            chosen[key] = (rec, index, why(rec))
    return list(chosen.values())


def check_rows(records: Iterable[Record], ladder: Ladder, stale: Stale | None = None) -> list[Row]:
    """One row per (rung, arch, where it ran, property): outcome passed only if it passed wherever it ran.

    From the newest current check record that tried the property, else the newest stale one. `runs` counts outcomes,
    `reasons` holds each distinct reason of the outcome shown.
    """
    why = _stale_once(stale or (lambda r: record_module.stale(r, ladder)))
    groups: dict[tuple, tuple[Record, list[Row]]] = {}
    for rec in sorted(_of_kind(records, "check", ladder), key=lambda r: (why(r) is None, _date(r))):
        fresh: dict[tuple, list[Row]] = {}
        for row in rec["rows"]:
            key = (rec["number"], row["arch"], rec["device"].get("name", "?"), row["property"])
            fresh.setdefault(key, []).append(row)
        for key, found in fresh.items():
            before = groups.get(key)
            ran = any(r["outcome"] != "not run" for r in found)
            if ran or before is None or (why(before[0]) is not None and why(rec) is None):
                groups[key] = (rec, found)
    return [
        _check_row(key, rec, found, why(rec)) for key, (rec, found) in sorted(groups.items(), key=lambda x: x[0][:3])
    ]


def overall(records: Iterable[Record], ladder: Ladder, stale: Stale | None = None) -> dict[tuple[int, str], Row]:
    """(rung, device) -> verdict over all cells of its current bench record (the newest of those with most cells)."""
    why = _stale_once(stale or (lambda r: record_module.stale(r, ladder)))
    best: dict[tuple[int, str], Record] = {}
    for rec in sorted(_of_kind(records, "bench", ladder), key=lambda r: (len(r["cells"]), _date(r))):
        if why(rec) is None and rec["cells"]:
            best[(rec["number"], rec["device"].get("name"))] = rec
    out = {}
    for key, rec in best.items():
        whole = stats.judge(rec["cells"])[1]
        out[key] = {
            "ratio": whole.rung.ratio,
            "interval": [whole.rung.low, whole.rung.high],
            "noise": whole.noise,
            "verdict": whole.verdict,
            "lost": list(whole.lost),
            "cells": len(rec["cells"]),
            "date": rec["date"],
            "complete": rec.get("complete", True),
        }
    return out


def untimed(records: Iterable[Record], ladder: Ladder, stale: Stale | None = None) -> list[Row]:
    """Cells that a current bench record tried and could not time, unless a later one could: with the reason."""
    why = _stale_once(stale or (lambda r: record_module.stale(r, ladder)))
    out: dict[tuple, Row | None] = {}
    for rec in sorted(_of_kind(records, "bench", ladder), key=_date):
        if why(rec) is not None:
            continue
        who = (rec["number"], rec["device"].get("name"))
        for cell in rec["cells"]:
            out[(*who, cell["case"], cell["regime"], cell["form"])] = None
        for cell in rec.get("failed") or []:
            key = (*who, cell["case"], cell["regime"], cell["form"])
            out[key] = {"rung": who[0], "device": who[1], **cell, "date": rec["date"]}
    return [row for row in out.values() if row]


def best(table: Sequence[Row], ladder: Ladder, failing: Collection[int] = ()) -> dict[tuple[str, str, str, str], Row]:
    """(device, case, regime, form) -> the fastest current row among rungs that are current or won.

    failing: rungs that fail a check (`failing_rungs`); a wrong result is never the best one.
    """
    out: dict[tuple[str, str, str, str], Row] = {}
    for row in table:
        key = (row["device"], row["case"], row["regime"], row["form"])
        if row["stale"] or row["rung"] in failing or ladder.rungs[row["rung"]].status not in BAR_STATUS:
            continue
        if key not in out or row["median_ms"] < out[key]["median_ms"]:
            out[key] = row
    return out


def failing_rungs(checks: Iterable[Row]) -> set[int]:
    """Rungs with a check that failed on the code as it is now."""
    return {c["rung"] for c in checks if c["outcome"] == "failed" and not c["stale"]}


def geomean(values: Iterable[float]) -> float | None:
    """Geometric mean, None of nothing."""
    logs = [math.log(v) for v in values]
    return math.exp(sum(logs) / len(logs)) if logs else None


def devices(table: Iterable[Row]) -> list[str]:
    return list(dict.fromkeys(row["device"] for row in table))


def age(date: str, now: datetime) -> str:
    """How long ago, in the largest fitting unit: 5 min, 3 h, 12 d."""
    minutes = max(0, int((now - datetime.fromisoformat(date)).total_seconds() // 60))
    if minutes < 60:
        return f"{minutes} min"
    return f"{minutes // 60} h" if minutes < 48 * 60 else f"{minutes // 1440} d"


def _date(rec: Record) -> datetime:
    return datetime.fromisoformat(rec["date"])


def _stale_once(stale: Stale) -> Stale:
    """Ask once per distinct code: hashing the sources for each of many records would be slow."""
    known: dict[tuple, str | None] = {}

    def ask(rec: Record) -> str | None:
        key = (rec["number"], rec["rung"], rec["code_hash"], rec.get("parent_hash"), rec["timing_version"])
        if key not in known:
            known[key] = stale(rec)
        return known[key]

    return ask


def _of_kind(records: Iterable[Record], kind: str, ladder: Ladder) -> list[Record]:
    return [r for r in records if r["kind"] == kind and r["number"] in ladder.rungs]


def _key(row: Row) -> tuple:
    return row["rung"], row["device"], row["case"], row["regime"], row["form"]


def _order(row: Row, ladder: Ladder) -> tuple:
    def place(value: str, known: Sequence[str]) -> tuple[int, str]:
        return (known.index(value) if value in known else len(known), value)

    return (
        list(ladder.rungs).index(row["rung"]),
        str(row["device"]),
        place(row["form"], FORMS),
        place(row["case"], list(ladder.cases)),
        place(row["regime"], REGIMES),
    )


def _more(rec: Record, cell: dict[str, Any], ladder: Ladder) -> Row:
    """What the page shows of a cell beyond the row that scripts get from `bench`."""
    eager = {name: statistics.median(times) for name, times in (cell.get("eager_ms") or {}).items() if times}
    return {
        "status": ladder.rungs[rec["number"]].status,
        "parent": rec["parent"],
        "parent_ms": statistics.median(cell["samples_ms"]["parent"]),
        "rounds": len(cell["samples_ms"]["rung"]),
        "eager_ms": eager.get("rung"),
        "rivals_eager": {n: ms for n, ms in eager.items() if n not in ("rung", "parent", "control")},
        "not_captured": cell.get("not_captured") or {},
        "stages_ms": cell.get("stages_ms") or {},
        "telemetry": cell.get("telemetry") or {},
        "shape": cell.get("shape") or {},
        "commit": rec.get("commit"),
        "dirty": rec.get("dirty"),
        "file": rec.get("file"),
        "complete": rec.get("complete", True),
    }


def _against_rivals(row: Row) -> Row:
    """The best rival: the fastest of all, each by its best clock. same_clock: False flatters us, and is marked."""
    if not row["rivals"]:
        return {"best_rival": None, "best_rival_ms": None, "speedup": None, "same_clock": None}
    name = min(row["rivals"], key=row["rivals"].__getitem__)
    ms = row["rivals"][name]
    return {
        "best_rival": name,
        "best_rival_ms": ms,
        "speedup": ms / row["median_ms"],
        "same_clock": row["rival_clocks"].get(name) == row["clock"],
    }


def _check_row(key: tuple, rec: Record, found: list[Row], why: str | None) -> Row:
    counts = {o: sum(r["outcome"] == o for r in found) for o in ("passed", "failed", "not run")}
    outcome = "failed" if counts["failed"] else "passed" if counts["passed"] else "not run"
    reasons = dict.fromkeys(_located(r) for r in found if r["outcome"] == outcome and r.get("reason"))
    return {
        "rung": key[0],
        "arch": key[1],
        "device": key[2],
        "property": key[3],
        "outcome": outcome,
        "runs": counts,
        "reasons": list(reasons),
        "hostile": sum_hostile(found),
        "stale": bool(why),
        "stale_reason": why,
        "date": rec["date"],
        "file": rec.get("file"),
    }


def _located(row: Row) -> str:
    cell = "/".join(str(row[k]) for k in ("case", "regime", "form") if row.get(k))
    return f"{cell}: {row['reason']}" if cell and row["outcome"] == "failed" else row["reason"]


def rung_summaries(
    records: Sequence[Record], ladder: Ladder, stale: Stale | None = None, table: Sequence[Row] | None = None
) -> list[Row]:
    """One row per rung and device it was timed on (device None where never): what a ladder table shows."""
    table = rows(records, ladder, stale) if table is None else table
    whole, checks = overall(records, ladder, stale), check_rows(records, ladder, stale)
    out = []
    for rung in ladder.rungs.values():
        for device in devices(r for r in table if r["rung"] == rung.number) or [None]:
            mine = [r for r in table if r["rung"] == rung.number and r["device"] == device]
            out.append(_summary(rung, device, mine, whole.get((rung.number, device)), checks))
    return out


def _summary(rung: Rung, device: str | None, mine: list[Row], whole: Row | None, checks: list[Row]) -> Row:
    live = [r for r in mine if not r["stale"]]
    own = [c for c in checks if c["rung"] == rung.number]
    vs = {f: geomean(r["speedup"] for r in live if r["form"] == f and r["speedup"]) for f in FORMS}
    return {
        "rung": rung.number,
        "name": rung.name,
        "slug": rung.slug,
        "parent": rung.parent,
        "idea": rung.idea,
        "status": rung.status,
        "reason": rung.reason,
        "archs": list(rung.archs),
        "replaces": list(rung.replaces),
        "device": device,
        "overall": whole,
        "speedup": vs,
        "cells": len(mine),
        "current": len(live),
        "date": max((r["date"] for r in mine), default=None),
        "stale": bool(mine) and not live,
        "stale_reason": next((r["stale_reason"] for r in mine if r["stale"]), None),
        "checks": {o: sum(c["outcome"] == o and not c["stale"] for c in own) for o in ("passed", "failed", "not run")},
        "hostile": sum_hostile(c for c in own if not c["stale"]),
        "checks_stale": sum(c["stale"] for c in own),
    }


def terminal(ladder: Ladder | None = None, console: Any = None, rungs: Collection[int] = ()) -> None:
    """Print the ladder, and the cells and checks of `rungs` (all of them by default)."""
    from ladder.report_terminal import show

    with _busy():
        show(ladder or _ladder(), console, rungs)


def write_html(path: Path | str, ladder: Ladder | None = None) -> Path:
    """Write the page to `path`, in one step; returns the path."""
    from ladder.report_html import write

    with _busy():
        return write(Path(path), ladder or _ladder())


def write_readme(path: Path | str | None = None, ladder: Ladder | None = None) -> bool:
    """Refresh the README's tables between their markers; True if the file changed."""
    from ladder.report_readme import write

    ladder = ladder or _ladder()
    with _busy():
        return write(Path(path) if path else ladder.root / "README.md", ladder)


def readme_is_current(path: Path | str | None = None, ladder: Ladder | None = None) -> bool:
    """Whether the README's tables are what `write_readme` would write."""
    from ladder.report_readme import refreshed

    ladder = ladder or _ladder()
    file = Path(path) if path else ladder.root / "README.md"
    text = file.read_text(encoding="utf-8")
    return refreshed(text, ladder) == text


def _busy() -> AbstractContextManager:
    """A spinner on a terminal: the intervals of many records take seconds."""
    from ladder.show import err

    return err.status("reading records")


def _ladder(root: Path = ROOT) -> Ladder:
    from ladder.manifest import load as load_ladder

    return load_ladder(root)
