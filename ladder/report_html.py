"""The report as one self-contained HTML page: what to look at first, then every number and how old it is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from ladder import record as record_module
from ladder import report, report_plots
from ladder.files import replace_text
from ladder.manifest import FORMS, REGIMES, Ladder

Row = dict[str, Any]
STAGE_ORDER = ("normalise", "gate", "intra", "wu", "scan", "state", "output")
HEAT_FULL = 4.0  # the speed-up (or slow-down) at which a heat-map cell has its full colour
OPEN_FORESTS = 2  # the newest rungs whose verdict plots are open at first


def write(path: Path, ladder: Ladder) -> Path:
    """Render the page from the committed records and replace `path` in one step."""
    replace_text(path, render(ladder))
    return path


def render(ladder: Ladder, stale: report.Stale | None = None, now: datetime | None = None) -> str:
    """The page's text. stale, now: as the records' own staleness and the clock say, unless given."""
    env = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    now = now or datetime.now(timezone.utc)
    env.filters |= {
        "ms": report_plots.ms,
        "pct": lambda noise: f"±{100 * (noise - 1):.1f}%",
        "age": lambda d: report.age(d, now),
    }
    return env.get_template("report.html.j2").render(context(ladder, stale, now))


def context(ladder: Ladder, stale: report.Stale | None, now: datetime) -> dict[str, Any]:
    records, problems = report.load(ladder)
    table = report.rows(records, ladder, stale)
    summaries = report.rung_summaries(records, ladder, stale, table)
    checks = report.check_rows(records, ladder, stale)
    failing = report.failing_rungs(checks)
    best = report.best(table, ladder, failing)
    errors = report.precision(records, ladder, stale)
    commit, dirty = record_module.git_state(ladder.root)
    return {
        "now": now,
        "commit": commit[:10] if commit else "no repository",
        "dirty": dirty,
        "problems": problems,
        "summaries": summaries,
        "devices": [_device(name, table, best, ladder, records) for name in report.devices(table)],
        "precision": _precision(errors),
        "precision_absent": list(dict.fromkeys(f"{n} ({why})" for r in errors for n, why in r["absent"].items() if n != "rung")),
        "checks": _matrix(checks),
        "failures": [c for c in checks if c["outcome"] == "failed"],
        "records": _record_lines(records, ladder, stale),
        "failing": sorted(failing),
        "untimed": report.untimed(records, ladder, stale),
        "rungs": list(ladder.rungs.values()),
    }


def _device(name: str, table: Sequence[Row], best: dict, ladder: Ladder, records: list[Row]) -> dict[str, Any]:
    mine = [r for r in table if r["device"] == name]
    newest = max(
        (r for r in records if r["kind"] == "bench" and r["device"].get("name") == name), key=lambda r: r["date"]
    )
    forms = [f for f in FORMS if any(r["form"] == f for r in mine)]
    return {
        "name": name,
        "anchor": "device-" + "".join(c if c.isalnum() else "-" for c in name),
        "arch": mine[0]["arch"],
        "about": {**newest["device"], "copy_gbps": newest.get("copy_gbps"), "date": newest["date"]},
        "tiles": _tiles(mine, best),
        "forms": [_form(f, [r for r in mine if r["form"] == f], best, ladder) for f in forms],
        "forests": _forests(mine, ladder),
        "rows": mine,
        "absent": _absent(mine),
        "rivals": list(dict.fromkeys(n for r in mine for n in r["rivals"])),
        "other_clock": any(r["rival_clocks"].get(n) != r["clock"] for r in mine for n in r["rivals"]),
    }


def _absent(rows: Sequence[Row]) -> list[tuple[str, str, int]]:
    """(rival, why it is absent, in how many cells)."""
    found = [(name, why) for r in rows for name, why in r["absent"].items()]
    return [(*key, found.count(key)) for key in dict.fromkeys(found)]


def _tiles(rows: Sequence[Row], best: dict) -> list[dict[str, str]]:
    """The figures to see first, from the best current rung of each `prod` cell (of `pre`, where prod was not timed)."""
    form = "prod" if any(r["form"] == "prod" and not r["stale"] for r in rows) else "pre"
    top = [b for b in best.values() if b["device"] == rows[0]["device"] and b["form"] == form]
    against = [b for b in top if b["speedup"]]
    tiles = []
    if against:
        worst = min(against, key=lambda b: b["speedup"])
        ahead = sum(b["speedup"] > 1 for b in against)
        tiles.append(
            {
                "value": f"{report.geomean(b['speedup'] for b in against):.2f}x",
                "label": f"as fast as the best rival, {form}",
                "note": f"geometric mean of {len(against)} cells, best rung of each",
            }
        )
        for regime in REGIMES[:2]:
            part = [b["speedup"] for b in against if b["regime"] == regime]
            if part:
                tiles.append(
                    {
                        "value": f"{report.geomean(part):.2f}x",
                        "label": f"as fast, {regime} gates",
                        "note": f"{len(part)} cells",
                    }
                )
        tiles.append(
            {
                "value": f"{ahead} of {len(against)}",
                "label": "cells ahead of every rival",
                "note": f"worst: {worst['case']} {worst['regime']}, {worst['speedup']:.2f}x of {worst['best_rival']}",
            }
        )
    if top:
        near, far = (pick(top, key=lambda b: b["times_floor"]) for pick in (min, max))
        tiles.append(
            {
                "value": f"{near['times_floor']:.1f}–{far['times_floor']:.1f}x",
                "label": "the time of the traffic floor",
                "note": f"nearest {near['case']} {near['regime']}, farthest {far['case']} {far['regime']}",
            }
        )
    live = [r for r in rows if not r["stale"]]
    if live:
        noise = sorted(100 * (r["noise"] - 1) for r in live)
        tiles.append(
            {
                "value": f"±{noise[len(noise) // 2]:.1f}%",
                "label": "A/A noise, median of cells",
                "note": f"largest ±{noise[-1]:.1f}%",
            }
        )
    tiles.append(
        {
            "value": f"{len(rows) - len(live)} of {len(rows)}",
            "label": "rows are stale",
            "note": "stale rows are in no average",
        }
    )
    return tiles


def _form(form: str, rows: Sequence[Row], best: dict, ladder: Ladder) -> dict[str, Any]:
    rungs = [n for n in ladder.rungs if any(r["rung"] == n for r in rows)]
    cases = [c for c in dict.fromkeys((*ladder.cases, *(r["case"] for r in rows))) if any(r["case"] == c for r in rows)]
    regimes = [g for g in REGIMES if any(r["regime"] == g for r in rows)]
    top = {(b["case"], b["regime"]): b for b in best.values() if b["form"] == form and b["device"] == rows[0]["device"]}
    limit = (
        max(
            [r["times_floor"] for r in rows]
            + [r["best_rival_ms"] / r["floor_ms"] for r in rows if r["best_rival"]]
            + [2]
        )
        * 1.7
    )
    return {
        "name": form,
        "regimes": regimes,
        "cases": cases,
        "climbs": [
            (
                c,
                _shape(ladder, c),
                [(g, top[c, g]) for g in regimes if (c, g) in top],
                report_plots.climb([r for r in rows if r["case"] == c], rungs),
            )
            for c in cases
        ],
        "floors": [
            (
                g,
                report_plots.floors(
                    [r for r in rows if r["regime"] == g], {c: b for (c, h), b in top.items() if h == g}, limit
                ),
            )
            for g in regimes
        ],
        "heat": [
            (c, [_heat(top.get((c, g)), any(r["case"] == c and r["regime"] == g for r in rows)) for g in regimes])
            for c in cases
        ],
        "heat_mean": [
            report.geomean(b["speedup"] for (_, h), b in top.items() if h == g and b["speedup"]) for g in regimes
        ],
        "rung_heat": _rung_heat(rows, rungs, cases, ladder),
        "stages": _stages(rows),
        "stage_names": _stage_names(rows),
    }


def _shape(ladder: Ladder, case: str) -> str:
    entry = ladder.cases.get(case)
    if entry is None:
        return "no longer in ladder.yaml"
    heads = f"H {entry.H}" if entry.H == entry.HV else f"H {entry.H}, HV {entry.HV}"
    return f"B {entry.B}, T {entry.T}, {heads}, K {entry.K}, V {entry.V}"


def _heat(row: Row | None, timed: bool = True) -> dict[str, Any]:
    """A heat-map cell: its speed-up, its colour (win or loss) and how much of it."""
    if row is None or row["speedup"] is None:
        return {
            "text": "",
            "side": "none",
            "share": 0,
            "note": ("no current row" if row is None else "no rival") if timed else "not timed",
            "title": "",
            "stale": False,
        }
    share = min(1.0, abs(math.log(row["speedup"])) / math.log(HEAT_FULL))
    title = (
        f"{row['name']} {report_plots.ms(row['median_ms'])} ms ({row['clock']}), {row['best_rival']} "
        f"{report_plots.ms(row['best_rival_ms'])} ms ({row['rival_clocks'][row['best_rival']]})"
    )
    return {
        "text": f"{row['speedup']:.2f}x" + ("" if row["same_clock"] else "*"),
        "side": "win" if row["speedup"] > 1 else "loss",
        "share": round(12 + 58 * share),
        "note": f"{row['rung']:03d} / {row['best_rival']}",
        "title": title,
        "stale": row["stale"],
    }


def _rung_heat(rows: Sequence[Row], rungs: list[int], cases: list[str], ladder: Ladder) -> dict[str, Any]:
    """Every rung against the best rival: a line per rung, a column per case and regime."""
    columns = [(c, [g for g in REGIMES if any(r["case"] == c and r["regime"] == g for r in rows)]) for c in cases]
    lines = []
    for n in rungs:
        own = {(r["case"], r["regime"]): r for r in rows if r["rung"] == n}
        mean = report.geomean(r["speedup"] for r in own.values() if r["speedup"] and not r["stale"])
        lines.append(
            {"rung": ladder.rungs[n], "cells": [_heat(own.get((c, g))) for c, gs in columns for g in gs], "mean": mean}
        )
    return {"columns": columns, "lines": lines}


def _stage_names(rows: Sequence[Row]) -> list[str]:
    seen = dict.fromkeys(s for r in rows for s in r["stages_ms"])
    return [s for s in STAGE_ORDER if s in seen] + [s for s in seen if s not in STAGE_ORDER]


def _stages(rows: Sequence[Row]) -> list[tuple[str, str]]:
    order, out = _stage_names(rows), []
    cells = dict.fromkeys((r["case"], r["regime"]) for r in rows if r["stages_ms"])
    for case, regime in cells:
        mine = [r for r in rows if r["stages_ms"] and (r["case"], r["regime"]) == (case, regime)]
        limit = max(sum(r["stages_ms"].values()) for r in mine)
        out.append((f"{case} {regime}", report_plots.stages(mine, order, limit)))
    return out


def _forests(rows: Sequence[Row], ladder: Ladder) -> list[dict[str, Any]]:
    """Newest rung first; a rung that is its own parent has only its A/A noise to show, and comes too."""
    timed = [n for n in ladder.rungs if any(r["rung"] == n for r in rows)]
    out = []
    for i, n in enumerate(reversed(timed)):
        plots = [
            (f, report_plots.forest(part))
            for f in FORMS
            if (part := [r for r in rows if r["rung"] == n and r["form"] == f])
        ]
        out.append(
            {
                "rung": ladder.rungs[n],
                "parent": ladder.parent(ladder.rungs[n]),
                "plots": plots,
                "open": i < OPEN_FORESTS,
            }
        )
    return out


def _precision(rows: Sequence[Row]) -> list[tuple[str, str, list[Row]]]:
    """(device, form, rows) of what has been measured against fp64."""
    keys = dict.fromkeys((device, form) for device in report.devices(rows) for form in FORMS)
    parts = [(*key, [r for r in rows if (r["device"], r["form"]) == key]) for key in keys]
    return [part for part in parts if part[2]]


def _matrix(checks: Sequence[Row]) -> dict[str, Any]:
    """Properties by (rung, arch, place). Columns where nothing ran are left to the list of what did not run."""
    place = lambda c: (c["rung"], c["arch"], c["device"])  # noqa: E731
    ran = {place(c) for c in checks if c["outcome"] != "not run"}
    columns = [k for k in dict.fromkeys(map(place, checks)) if k in ran]
    if named := {(k[0], k[2]) for k in columns if k[1] != "-"}:  # a property of the rung itself has no architecture
        columns = [k for k in columns if k[1] != "-" or (k[0], k[2]) not in named]
    at = {(c["property"], *place(c)): c for c in checks}
    lines = [
        (p, [at.get((p, *k)) or at.get((p, k[0], "-", k[2])) for k in columns])
        for p in dict.fromkeys(c["property"] for c in checks)
    ]
    dates = [max(c["date"] for c in checks if place(c) == key) for key in columns]
    rungs = [(n, sum(c[0] == n for c in columns)) for n in dict.fromkeys(c[0] for c in columns)]
    return {"columns": columns, "rungs": rungs, "dates": dates, "lines": lines, "not_run": _not_run(checks)}


def _not_run(checks: Sequence[Row]) -> list[tuple[str, str, str, list[int]]]:
    """(arch, place, reason, rungs) of everything that did not run."""
    out: dict[tuple[str, str, str], list[int]] = {}
    for c in checks:
        for reason in c["reasons"] if c["outcome"] == "not run" else ():
            rungs = out.setdefault((c["arch"], c["device"], reason), [])
            if c["rung"] not in rungs:
                rungs.append(c["rung"])
    return [(*key, rungs) for key, rungs in out.items()]


def _record_lines(records: Sequence[Row], ladder: Ladder, stale: report.Stale | None) -> list[Row]:
    ask = report._stale_once(stale or (lambda r: record_module.stale(r, ladder)))
    return [
        {
            "file": r["file"],
            "kind": r["kind"],
            "rung": r["rung"],
            "device": r["device"].get("name", "?"),
            "date": r["date"],
            "stale": ask(r),
            "commit": (r.get("commit") or "–")[:10],
            "dirty": r.get("dirty"),
            "complete": r.get("complete", True),
            "count": len(r.get("cells") or r.get("rows") or r.get("precision") or []),
            "versions": r.get("versions") or {},
            "seen": _telemetry(r.get("cells") or []),
        }
        for r in reversed(records)
    ]


def _telemetry(cells: Sequence[Row]) -> str:
    """Ranges over a record's cells: SM clock, temperature, power, and any throttling."""
    parts = []
    for key, unit in (("sm_mhz", "MHz"), ("temp_c", "°C"), ("power_w", "W")):
        values = [v for c in cells for v in _numbers((c.get("telemetry") or {}).get(key))]
        if values:
            low, high = f"{min(values):.0f}", f"{max(values):.0f}"
            parts.append(f"{low if low == high else low + '–' + high} {unit}")
    reasons = sorted({str(x) for c in cells for x in (c.get("telemetry") or {}).get("throttle") or []})
    return ", ".join(parts + ([f"throttled: {', '.join(reasons)}"] if reasons else []))


def _numbers(value: Any) -> list[float]:
    values = value if isinstance(value, list) else [value]
    return [v for v in values if isinstance(v, (int, float))]
