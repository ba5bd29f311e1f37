"""The page's plots as inline SVG: text, lines and shapes whose colours are CSS classes, so light and dark both work.

Each function takes rows (ladder/report.py) and returns one `<svg>` string. Every mark carries a `<title>`, shown on
hover and read aloud; the same figures stand in the tables under the plots.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

Row = dict[str, Any]


class Svg:
    """A drawing of fixed size in CSS pixels."""

    def __init__(self, width: float, height: float, label: str) -> None:
        self.width, self.height, self.label = width, height, label
        self.parts: list[str] = []

    def line(self, x1: float, y1: float, x2: float, y2: float, css: str, title: str = "") -> None:
        self.parts.append(
            f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{css}">{_title(title)}</line>'
        )

    def rect(self, x: float, y: float, w: float, h: float, css: str, title: str = "") -> None:
        size = f'width="{max(w, 0.5):.1f}" height="{h:.1f}"'
        self.parts.append(f'<rect x="{x:.1f}" y="{y:.1f}" {size} class="{css}">{_title(title)}</rect>')

    def circle(self, x: float, y: float, r: float, css: str, title: str = "") -> None:
        self.parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{r}" class="{css}">{_title(title)}</circle>')

    def path(self, points: Iterable[tuple[float, float]], css: str, closed: bool = False, title: str = "") -> None:
        d = "M" + " L".join(f"{x:.1f} {y:.1f}" for x, y in points) + ("Z" if closed else "")
        self.parts.append(f'<path d="{d}" class="{css}">{_title(title)}</path>')

    def text(self, x: float, y: float, text: str, css: str = "", anchor: str = "start") -> None:
        self.parts.append(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{css}">{escape(text)}</text>')

    def cross(self, x: float, y: float, css: str, title: str = "") -> None:
        d = f"M{x - 4:.1f} {y - 4:.1f} L{x + 4:.1f} {y + 4:.1f} M{x - 4:.1f} {y + 4:.1f} L{x + 4:.1f} {y - 4:.1f}"
        self.parts.append(f'<path d="{d}" class="{css}">{_title(title)}</path>')

    def diamond(self, x: float, y: float, css: str, title: str = "") -> None:
        self.path([(x, y - 5), (x + 5, y), (x, y + 5), (x - 5, y)], css, closed=True, title=title)

    def __str__(self) -> str:
        return (
            f'<svg role="img" data-plot aria-label="{escape(self.label, quote=True)}" width="{self.width:g}" '
            f'height="{self.height:g}" viewBox="0 0 {self.width:g} {self.height:g}">{"".join(self.parts)}</svg>'
        )


def _title(text: str) -> str:
    return f"<title>{escape(text)}</title>" if text else ""


def ms(value: float) -> str:
    """Milliseconds with three significant digits."""
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.{max(0, 2 - math.floor(math.log10(value)))}f}" if value > 0 else "0"


def log_ticks(low: float, high: float) -> list[float]:
    """Ticks at 1, 2, 5 times powers of ten within [low, high], thinned to at most six."""
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for mantissas in ((1, 2, 5), (1, 3), (1,)):
        ticks = [m * 10.0**e for e in exponents for m in mantissas if low <= m * 10.0**e <= high]
        if len(ticks) <= 6:
            break
    return ticks if len(ticks) >= 2 else [low, high]


class LogScale:
    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        self.low, self.high, self.start, self.end = math.log(low), math.log(high), start, end

    def __call__(self, value: float) -> float:
        return self.start + (math.log(value) - self.low) / (self.high - self.low) * (self.end - self.start)


def tick(value: float) -> str:
    return f"{value:.2g}" if value < 10 else f"{value:.0f}"


def _state(row: Row) -> str:
    state = row["status"] if row["status"] in ("falsified", "draft") else ""
    return ", ".join(x for x in (state, "stale" if row["stale"] else "") if x)


def told(row: Row) -> str:
    """One mark in words."""
    state = _state(row)
    return (
        f"{row['name']}{' (' + state + ')' if state else ''}, {row['case']} {row['regime']} {row['form']}: "
        f"{ms(row['median_ms'])} ms ({row['clock']}), {row['times_floor']:.1f}x the floor, "
        f"{row['ratio_to_parent']:.3f} of its parent's time, {row['verdict']}"
    )


def _mark(svg: Svg, x: float, y: float, row: Row, css: str, radius: float = 4) -> None:
    hollow = " hollow" if row["stale"] else ""
    if row["status"] == "falsified":
        svg.cross(x, y, f"{css} cross{hollow}", told(row))
    else:
        svg.circle(x, y, radius, f"{css} dot{hollow or (' hollow' if row['status'] == 'draft' else '')}", told(row))


def climb(rows: Sequence[Row], rungs: Sequence[int]) -> str:
    """One case and form: time over rungs, a line per regime, its best rival dashed, the floor below."""
    width, height, left, right, top, bottom = 310, 208, 40, 8, 8, 26
    regimes = list(dict.fromkeys(r["regime"] for r in rows))
    values = [r["median_ms"] for r in rows] + [r["floor_ms"] for r in rows]
    latest = {g: _latest_rival(rows, g) for g in regimes}
    values += [r["best_rival_ms"] for r in latest.values() if r]
    svg = Svg(width, height, f"Time of {rows[0]['case']}, form {rows[0]['form']}, per rung, in milliseconds, log scale")
    y = LogScale(min(values) * 0.85, max(values) * 1.18, height - bottom, top)
    step = (width - left - right) / max(len(rungs), 1)
    x = {n: left + step * (i + 0.5) for i, n in enumerate(rungs)}
    for value in log_ticks(min(values) * 0.85, max(values) * 1.18):
        svg.line(left, y(value), width - right, y(value), "grid")
        svg.text(left - 5, y(value) + 4, tick(value), "tick", "end")
    skip = max(1, math.ceil(len(rungs) / 14))
    for i, n in enumerate(rungs):
        if i % skip == 0:
            svg.text(x[n], height - 9, f"{n:03d}" if len(rungs) <= 8 else str(n), "tick", "middle")
    floor = rows[-1]["floor_ms"]
    svg.line(left, y(floor), width - right, y(floor), "floor", f"floor: {ms(floor)} ms")
    for g, rival in latest.items():
        if rival:
            name = f"{rival['best_rival']}, best rival, {g}: {ms(rival['best_rival_ms'])} ms"
            svg.line(left, y(rival["best_rival_ms"]), width - right, y(rival["best_rival_ms"]), f"rival r-{g}", name)
    for i, g in enumerate(regimes):
        aside = (i - (len(regimes) - 1) / 2) * min(4.5, step / 5)  # equal times must not hide each other
        mine = sorted((r for r in rows if r["regime"] == g), key=lambda r: rungs.index(r["rung"]))
        kept = [(x[r["rung"]] + aside, y(r["median_ms"])) for r in mine if r["status"] in ("current", "won")]
        if len(kept) > 1:
            svg.path(kept, f"series r-{g}")
        for r in mine:
            _mark(svg, x[r["rung"]] + aside, y(r["median_ms"]), r, f"r-{g}", 3.5)
    return str(svg)


def _latest_rival(rows: Sequence[Row], regime: str) -> Row | None:
    timed = [r for r in rows if r["regime"] == regime and r["best_rival"]]
    return max(timed, key=lambda r: (not r["stale"], r["date"])) if timed else None


def floors(rows: Sequence[Row], best: dict[str, Row], limit: float) -> str:
    """One regime and form: multiple of the floor per case; every rung, the best one and the best rival named."""
    cases = list(dict.fromkeys(r["case"] for r in rows))
    width, left, right, top, line = 640, 104, 76, 6, 26
    height = top + line * len(cases) + 26
    svg = Svg(
        width, height, f"Multiple of the floor per case, regime {rows[0]['regime']}, form {rows[0]['form']}, log scale"
    )
    x = LogScale(1, limit, left, width - right)
    for value in log_ticks(1, limit):
        svg.line(x(value), top, x(value), height - 22, "grid")
        svg.text(x(value), height - 7, f"{tick(value)}x", "tick", "middle")
    for i, case in enumerate(cases):
        y = top + line * (i + 0.5)
        svg.text(left - 8, y + 4, case, "name", "end")
        _floor_line(svg, x, y, [r for r in rows if r["case"] == case], best.get(case))
    return str(svg)


def _floor_line(svg: Svg, x: LogScale, y: float, rows: Sequence[Row], best: Row | None) -> None:
    if best:
        svg.line(x(1), y, x(best["times_floor"]), y, "reach")
    for r in rows:
        if best is None or r["rung"] != best["rung"]:
            _mark(svg, x(r["times_floor"]), y, r, "past", 3)
    shown = max((r for r in rows if r["best_rival"]), key=lambda r: (not r["stale"], r["date"]), default=None)
    if shown:
        multiple = shown["best_rival_ms"] / shown["floor_ms"]
        name = f"{shown['best_rival']}: {ms(shown['best_rival_ms'])} ms, {multiple:.1f}x the floor"
        svg.diamond(x(multiple), y, "rivalmark", name)
    if best:
        _mark(svg, x(best["times_floor"]), y, best, "ours", 5)
        svg.text(svg.width - 4, y + 4, f"{best['rung']:03d}  {best['times_floor']:.1f}x", "tick strong", "end")


def forest(rows: Sequence[Row]) -> str:
    """One rung and form: time over the parent's time per cell with its interval, over the band that is noise."""
    low = min(min(r["interval"][0], 1 / r["noise"]) for r in rows)
    high = max(max(r["interval"][1], r["noise"]) for r in rows)
    pad = (high / low) ** 0.06
    low, high = min(low / pad, 0.97), max(high * pad, 1.03)
    width, left, right, top, line = 640, 148, 58, 6, 20
    height = top + line * len(rows) + 26
    svg = Svg(
        width, height, f"Time of {rows[0]['name']} over its parent's, form {rows[0]['form']}, with intervals and noise"
    )
    x = LogScale(low, high, left, width - right)
    for value in _ratio_ticks(low, high):
        svg.line(x(value), top, x(value), height - 22, "grid one" if value == 1 else "grid")
        svg.text(x(value), height - 7, f"{value:g}", "tick", "middle")
    for i, r in enumerate(rows):
        y = top + line * (i + 0.5)
        noise = f"noise of the A/A control: within {100 * (r['noise'] - 1):.1f}%"
        svg.rect(x(1 / r["noise"]), y - 7, x(r["noise"]) - x(1 / r["noise"]), 14, "noise", noise)
        css = "v-stale" if r["stale"] else f"v-{r['verdict'].split()[0]}"
        svg.line(x(r["interval"][0]), y, x(r["interval"][1]), y, f"whisker {css}", told(r))
        svg.circle(x(r["ratio_to_parent"]), y, 3.5, f"dot {css}", told(r))
        svg.text(left - 8, y + 4, f"{r['case']} {r['regime']}", "name", "end")
        svg.text(width - right + 8, y + 4, f"{r['ratio_to_parent']:.3f}", f"tick {css}")
    return str(svg)


def _ratio_ticks(low: float, high: float) -> list[float]:
    for step in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5):
        ticks = [round(step * i, 4) for i in range(math.ceil(low / step), math.floor(high / step) + 1) if i > 0]
        if len(ticks) <= 8:
            return sorted({1.0, *ticks}) if low <= 1 <= high else ticks
    return [1.0]


def stages(rows: Sequence[Row], order: Sequence[str], limit: float) -> str:
    """One cell: each rung's stages laid end to end, in milliseconds from zero."""
    width, left, right, top, line = 420, 40, 48, 4, 22
    height = top + line * len(rows) + 24
    svg = Svg(
        width, height, f"Time per stage of {rows[0]['case']} {rows[0]['regime']}, form {rows[0]['form']}, per rung"
    )
    scale = (width - left - right) / limit
    unit = next(u for e in range(-5, 6) for u in (1e1**e, 2 * 1e1**e, 5 * 1e1**e) if limit / u <= 5)
    for i in range(int(limit / unit) + 1):
        svg.line(left + i * unit * scale, top, left + i * unit * scale, height - 20, "grid")
        svg.text(left + i * unit * scale, height - 6, f"{i * unit:.4g}", "tick", "middle")
    for i, r in enumerate(rows):
        y, x = top + line * (i + 0.5), left
        svg.text(left - 6, y + 4, f"{r['rung']:03d}", "name", "end")
        for name in sorted(r["stages_ms"], key=lambda s: order.index(s)):
            w = r["stages_ms"][name] * scale
            css = f"s{order.index(name) % 8}" + (" faded" if r["stale"] else "")
            svg.rect(x, y - 8, max(w - 1, 0.5), 16, css, f"{r['name']}, {name}: {ms(r['stages_ms'][name])} ms")
            x += w
        svg.text(x + 4, y + 4, ms(sum(r["stages_ms"].values())), "tick")
    return str(svg)
