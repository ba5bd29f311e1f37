"""The picture of a trace: an SVG timeline per launch, alone or in one self-contained page."""

from __future__ import annotations

from html import escape

from .trace import STEPS, text

LEFT, WIDTH, ROW, GAP, LANES = 190, 1110, 18, 4, 6
TOP, BOTTOM = 34, 52
COLOUR = {
    "run": "#3b6ea8", "mbarrier": "#f0b75a", "barrier": "#d9797b", "own work": "#b9a6d3",
    "bulk load": "#4f9d69", "bulk store": "#8a63b5", "wgmma": "#c2418f", "tcgen05 mma": "#c2418f", "tcgen05 commit": "#7a4a2b",
    "tcgen05 ld": "#2a9d9d", "tcgen05 st": "#7fb8b8",
}  # fmt: skip
NAME = {"run": "runs", "mbarrier": "waits on an mbarrier", "barrier": "waits on a CTA barrier",
        "own work": "waits for its own asynchronous work"}  # fmt: skip


def svg(launch):
    """One launch as an SVG element: a row per warp, then rows of asynchronous operations from issue to completion."""
    end = max([launch.steps, 1, *(s.end for s in launch.operations)])
    rows, y = [], TOP
    x = lambda step: LEFT + step / end * WIDTH  # noqa: E731
    bars = []
    for role in launch.roles:
        top = y
        for w in range(role.first, role.last + 1):
            rows.append((y, f"warp {w}"))
            bars.append(f'<rect class="row" x="{LEFT}" y="{y}" width="{WIDTH}" height="{ROW}"/>')
            bars += [_bar(s, x, y, ROW, launch) for s in launch.waits + launch.runs if s.warp == w]
            bars += [_tick(s, x, y) for s in launch.events if s.warp == w and s.kind in ("arrive", "fence")]
            y += ROW + GAP
        rows.append(((top + y - GAP - ROW) / 2, None, role.name))
        y += 4
    for kind in dict.fromkeys(s.kind for s in launch.operations):
        # all four warps of a group issue the same wgmma: one is enough
        lanes = _pack([s for s in launch.operations if s.kind == kind and (kind != "wgmma" or s.warp % 4 == 0)], end)
        rows.append((y - 4 + (len(lanes) - 1) * 6, kind))
        for lane in lanes:
            bars += [_bar(s, x, y, 10, launch, end) for s in lane]
            y += 12
        y += 6
    height = y + BOTTOM
    labels = [f'<text x="{LEFT - 8}" y="{r[0] + ROW - 5}" text-anchor="end">{escape(r[1])}</text>' for r in rows if r[1]]
    labels += [f'<text class="role" x="6" y="{r[0] + ROW - 5}">{escape(r[2])}</text>' for r in rows if not r[1]]
    head = f"{launch.kernel}  grid {'×'.join(map(str, launch.grid))}  CTA {launch.cta}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 20} {height}" width="{LEFT + WIDTH + 20}" '
        f'height="{height}" font-family="sans-serif" font-size="12">{_STYLE}<rect width="100%" height="100%" fill="#fff"/>'
        f'<text x="6" y="18" font-size="14" font-weight="bold">{escape(head)}</text>'
        f"{''.join(_axis(end, x, y))}{''.join(labels)}{''.join(bars)}{_legend(launch, y + 44)}</svg>"
    )


_STYLE = (
    "<style>.row{fill:#f1f3f5}.role{font-weight:bold;fill:#333}.grid{stroke:#cfd4da;stroke-width:1}"
    "rect.b:hover{stroke:#000;stroke-width:1}</style>"
)


def _bar(s, x, y, height, launch, end=None):
    stop = s.end if s.end >= 0 else end
    words = f"{s.what}, steps {s.start} to {stop if s.end >= 0 else 'the end'}, warp {s.warp}"
    inset = 0 if s.kind == "run" or end else 4
    edge = ' stroke="#fff" stroke-width=".6"' if end else ""
    return (
        f'<rect class="b" x="{x(s.start):.1f}" y="{y + inset}" width="{max(x(stop) - x(s.start), 0.7):.1f}" '
        f'height="{height - 2 * inset}" fill="{COLOUR.get(s.kind, "#888")}"{edge}><title>{escape(words)}'
        f"{escape(chr(10) + s.where) if s.where else ''}</title></rect>"
    )


def _tick(s, x, y):
    colour = "#111" if s.kind == "arrive" else "#d00"
    return (
        f'<path d="M{x(s.start):.1f} {y - 2}v{ROW // 2}" stroke="{colour}" stroke-width="1.2"><title>'
        f"{escape(f'{s.what}, step {s.start}')}{escape(chr(10) + s.where) if s.where else ''}</title></path>"
    )


def _pack(spans, end):
    """Overlapping spans into as few lanes as they need, at most LANES."""
    lanes = []
    for s in sorted(spans, key=lambda s: s.start):
        stop = s.end if s.end >= 0 else end
        free = [lane for lane in lanes if lane[0] <= s.start]
        if free:
            lane = free[0]
        elif len(lanes) < LANES:
            lane = [0]
            lanes.append(lane)
        else:
            lane = min(lanes, key=lambda lane: lane[0])
        lane[0] = stop
        lane.append(s)
    return [lane[1:] for lane in lanes]


def _axis(end, x, y):
    raw = end / 8
    unit = next(m * 10**e for e in range(9) for m in (1, 2, 5) if m * 10**e >= raw)
    for step in range(0, end + 1, unit):
        yield f'<path class="grid" d="M{x(step):.1f} {TOP - 6}V{y}"/>'
        yield f'<text x="{x(step):.1f}" y="{y + 14}" text-anchor="middle" fill="#555">{step:,}</text>'
    yield f'<text x="{LEFT + WIDTH}" y="{y + 28}" text-anchor="end" fill="#555">{STEPS}</text>'


def _legend(launch, y):
    shown = ["run"] + [k for k in COLOUR if any(s.kind == k for s in launch.waits + launch.operations) and k != "run"]
    out, at = [], LEFT
    if launch.operations:
        out.append(f'<text x="{LEFT}" y="{y - 16}" fill="#555">asynchronous operations: from issue to completion</text>')
    for kind in shown:
        name = NAME.get(kind, kind)
        out.append(f'<rect x="{at}" y="{y - 9}" width="12" height="10" fill="{COLOUR[kind]}"/><text x="{at + 17}" y="{y}">{name}</text>')
        at += 38 + 6.3 * len(name)
    for colour, name in (("#111", "arrives"), ("#d00", "fence")):
        out.append(f'<path d="M{at + 4} {y - 9}v10" stroke="{colour}" stroke-width="1.5"/><text x="{at + 10}" y="{y}">{name}</text>')
        at += 38 + 6.3 * len(name)
    return "".join(out)


def page(title, launches, notes=""):
    """One HTML file without references to anything outside: notes, then every launch's picture and text; launches in which
    warps do different things are open."""
    parts = [f"<pre>{escape(notes)}</pre>" if notes else ""]
    for launch in launches:
        words = escape("\n".join(text(launch)))
        parts.append(f"<details{' open' if launch.telling else ''}><summary>{escape(launch.kernel)}, CTA {launch.cta}, "
                     f"{launch.steps} steps</summary>{svg(launch)}<details><summary>as text</summary><pre>{words}</pre></details></details>")  # fmt: skip
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title><style>body{{font-family:sans-serif;'
        "margin:20px;color:#222}summary{cursor:pointer;font-weight:bold;padding:4px 0}pre{font-size:12px;overflow-x:auto}"
        f"svg{{max-width:100%;height:auto}}</style><h1>{escape(title)}</h1><p>The axis counts {STEPS}. Point at a bar for its words."
        f"</p>{''.join(parts)}</html>\n"
    )


def standalone(launches):
    """All pictures below each other in one SVG file."""
    drawn = [svg(launch) for launch in launches]
    heights = [float(d.split('height="', 1)[1].split('"')[0]) for d in drawn]
    out, y = [], 0
    for d, h in zip(drawn, heights):
        out.append(d.replace("<svg ", f'<svg y="{y}" ', 1))
        y += h + 10
    return (f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 20}" height="{y}" '
            f'viewBox="0 0 {LEFT + WIDTH + 20} {y}">{"".join(out)}</svg>\n')  # fmt: skip
