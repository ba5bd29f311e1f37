"""The README's tables, from the records. Only the text between `<!-- ladder:NAME -->` and `<!-- /ladder:NAME -->` is
replaced; dates stand there rather than ages, so that the file changes only when a record does."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ladder import report
from ladder.files import replace_text
from ladder.manifest import FORMS, REGIMES, Ladder
from ladder.report_plots import ms

HEADLINE = ("h96", "prod")  # the case and form whose times the rung table quotes
Row = dict[str, Any]


class ReadmeError(ValueError):
    """A marker of the README is missing its partner, or names a table that does not exist."""


def write(path: Path, ladder: Ladder) -> bool:
    """Refresh the tables of `path` in one step; True if that changed the file. Raises ReadmeError."""
    text = path.read_text(encoding="utf-8")
    fresh = refreshed(text, ladder)
    if fresh == text:
        return False
    replace_text(path, fresh, path.stat().st_mode & 0o777)
    return True


def refreshed(text: str, ladder: Ladder, stale: report.Stale | None = None) -> str:
    """`text` with every marked table as the records say now. Raises ReadmeError."""
    _check_markers(text)
    records, _ = report.load(ladder)
    table = report.rows(records, ladder, stale)
    made = {
        name: make(records, table, ladder, stale) for name, make in TABLES.items() if f"<!-- ladder:{name} -->" in text
    }
    for name, body in made.items():
        pattern = rf"(<!-- ladder:{name} -->\n).*?(<!-- /ladder:{name} -->)"
        text = re.sub(pattern, lambda m, body=body: f"{m.group(1)}{body}\n{m.group(2)}", text, flags=re.S)
    return text


def _check_markers(text: str) -> None:
    opened = re.findall(r"<!-- ladder:([\w-]+) -->", text)
    closed = re.findall(r"<!-- /ladder:([\w-]+) -->", text)
    for name in dict.fromkeys([*opened, *closed]):
        if name not in TABLES:
            raise ReadmeError(f"README.md: marker ladder:{name}; accepted: {', '.join(TABLES)}")
        order = re.findall(rf"<!-- (/?)ladder:{name} -->", text)
        if order != ["", "/"] * (len(order) // 2) or not re.search(rf"<!-- ladder:{name} -->\n", text):
            raise ReadmeError(f"README.md: marker ladder:{name} must open and close, each on a line of its own")


def _markdown(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    cells = [[c.replace("|", "\\|").replace("\n", " ") for c in row] for row in [head, *body]]
    lines = ["| " + " | ".join(row) + " |" for row in cells]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]])


def rungs(records: Sequence[Row], table: Sequence[Row], ladder: Ladder, stale: report.Stale | None) -> str:
    """One line per rung and device: status, time over the parent's, headline times, speed-up over the best rival."""
    case, form = HEADLINE
    body = []
    for s in report.rung_summaries(records, ladder, stale, table):
        own = [r for r in table if r["rung"] == s["rung"] and r["device"] == s["device"] and not r["stale"]]
        times = [
            next((ms(r["median_ms"]) for r in own if (r["case"], r["form"], r["regime"]) == (case, form, g)), "–")
            for g in REGIMES[:2]
        ]
        whole, speedup = s["overall"], s["speedup"][form]
        idea = s["idea"] + (f" ({s['status']}: {s['reason']})" if s["reason"] else "")
        body.append(
            [
                f"[{s['name']}](ideas/{s['name']}/NOTES.md)",
                idea,
                s["status"],
                s["device"] or "not timed",
                f"{whole['ratio']:.3f} ({whole['verdict']})" if whole else "stale" if s["stale"] else "–",
                *times,
                f"{speedup:.2f}x" if speedup else "–",
                s["date"][:10] if s["date"] else "–",
            ]
        )
    head = [
        "rung",
        "idea",
        "status",
        "timed on",
        "time / parent",
        *(f"{case} {form} {g}, ms" for g in REGIMES[:2]),
        f"vs best rival, {form}",
        "date",
    ]
    return _markdown(head, body)


def rivals(records: Sequence[Row], table: Sequence[Row], ladder: Ladder, stale: report.Stale | None) -> str:
    """Per device and form: the best rung's time, the best rival's, and their ratio, by case and regime."""
    failing = report.failing_rungs(report.check_rows(records, ladder, stale))
    best = report.best(table, ladder, failing)
    parts = []
    for device in report.devices(table):
        for form in FORMS:
            own = {(c, g): b for (d, c, g, f), b in best.items() if (d, f) == (device, form)}
            if not own:
                continue
            regimes = [g for g in REGIMES if any(k[1] == g for k in own)]
            cases = [c for c in ladder.cases if any(k[0] == c for k in own)]
            body = [[c, *(_versus(own.get((c, g))) for g in regimes)] for c in cases]
            means = [
                report.geomean(b["speedup"] for (_, h), b in own.items() if h == g and b["speedup"]) for g in regimes
            ]
            body.append(["geometric mean", *(f"**{m:.2f}x**" if m else "–" for m in means)])
            title = f"{device}, form `{form}`: ours / best rival in ms, and the rival's time over ours"
            parts.append(f"{title}\n\n{_markdown(['case', *regimes], body)}")
    return "\n\n".join(parts) or "No current timing is recorded."


def _versus(row: Row | None) -> str:
    if row is None:
        return "–"
    if row["speedup"] is None:
        return f"{ms(row['median_ms'])} ({row['rung']:03d}), no rival"
    other = "" if row["same_clock"] else f", by {row['rival_clocks'][row['best_rival']]}"
    return (
        f"**{row['speedup']:.2f}x**: {ms(row['median_ms'])} ({row['rung']:03d}) / "
        f"{ms(row['best_rival_ms'])} ({row['best_rival']}{other})"
    )


TABLES: dict[str, Callable[[Sequence[Row], Sequence[Row], Ladder, Any], str]] = {"rungs": rungs, "rivals": rivals}
