"""The report as terminal tables: the ladder, then per device and form its cells, then errors against fp64, then the checks;
and what `ladder best` prints."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime, timezone
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from ladder import report
from ladder.manifest import FORMS, Ladder
from ladder.rows import MEASURES
from ladder.show import out

OTHER_CLOCK = ("* by another clock than the rung's: a rival that cannot be captured in a CUDA graph, or scaled from a table "
               "(ladder/noted.py)")  # fmt: skip
MEASURE = {"worst_row": "worst row", "l2": "L2"}
STYLE = {
    "win": "bold green",
    "loss": "bold red",
    "mixed": "yellow",
    "inside noise": "dim",
    "passed": "green",
    "failed": "bold red",
    "not run": "dim",
    "no worse": "green",
    "worse": "bold red",
    "no rival": "dim",
}


def show(
    ladder: Ladder,
    console: Console | None = None,
    rungs: Collection[int] = (),
    stale: Any = None,
    now: datetime | None = None,
) -> None:
    """Print what the records say (cells and checks of `rungs`, all by default); stale rows are never summarised."""
    console, now = console or out, now or datetime.now(timezone.utc)
    records, problems = report.load(ladder)
    table = report.rows(records, ladder, stale)
    if not ladder.rungs:
        console.print("No rung in ladder.yaml.")
        return
    console.print(_ladder_table(report.rung_summaries(records, ladder, stale, table), now))
    if not table:
        console.print(
            "No timing recorded yet: `make rung N=1` on a machine with an NVIDIA GPU writes the first record."
        )
    table = [r for r in table if not rungs or r["rung"] in rungs]
    for device in report.devices(table):
        for form in FORMS:
            mine = [r for r in table if r["device"] == device and r["form"] == form]
            if mine:
                console.print(_cell_table(mine, device, form, now))
    errors = [r for r in report.precision(records, ladder, stale) if not rungs or r["rung"] in rungs]
    precision_tables(errors, console, now)
    checks = [c for c in report.check_rows(records, ladder, stale) if not rungs or c["rung"] in rungs]
    if checks:
        console.print(_check_table(checks, now))
    for u in report.untimed(records, ladder, stale):
        where = f"{u['rung']:03d} {u['case']}/{u['regime']}/{u['form']} on {u['device']}"
        console.print(f"could not be timed: {where}: {escape(u['reason'])}", style="red")
    _footer(console, table, [*errors, *checks], problems)


def _table(title: str, *columns: str, right: tuple[str, ...] = ()) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        table.add_column(name, justify="right" if name in right else "left", no_wrap=name not in ("idea", "reason"))
    return table


def factor(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}x"


def milliseconds(value: float | None) -> str:
    """Three significant digits, without trailing noise."""
    if value is None:
        return "–"
    return f"{value:.4f}" if value < 0.1 else f"{value:.3f}" if value < 10 else f"{value:.1f}"


def _ladder_table(summaries: list[dict], now: datetime) -> Table:
    table = _table(
        "The ladder",
        "rung",
        "status",
        "idea",
        "device",
        "time/parent",
        "verdict",
        "vs best rival",
        "checks",
        "age",
        right=("time/parent", "vs best rival", "age"),
    )
    for s in summaries:
        whole, checks = s["overall"], s["checks"]
        idea = escape(s["idea"]) + (f"\n[dim]{s['status']}: {escape(s['reason'])}[/dim]" if s["reason"] else "")
        ratio = f"{whole['ratio']:.3f} [{whole['interval'][0]:.3f}, {whole['interval'][1]:.3f}]" if whole else "–"
        verdict = (
            Text(whole["verdict"], STYLE[whole["verdict"]]) if whole else Text("stale" if s["stale"] else "–", "yellow")
        )
        told = " ".join(f"{n} {o}" for o, n in checks.items() if n) or ("stale" if s["checks_stale"] else "none")
        if s["hostile"]:
            told += "\nhostile: " + ", ".join(f"{n} {kind}" for kind, n in s["hostile"].items())
        table.add_row(
            s["name"],
            s["status"],
            idea,
            s["device"] or "–",
            ratio,
            verdict,
            factor(s["speedup"]["prod"]),
            told,
            report.age(s["date"], now) if s["date"] else "–",
        )
    return table


def _cell_table(rows: list[dict], device: str, form: str, now: datetime) -> Table:
    rivals = list(dict.fromkeys(name for r in rows for name in r["rivals"]))
    table = _table(
        f"{device}, form {form} (ms; ratio = time / parent's time)",
        "rung",
        "case",
        "regime",
        "clock",
        "median",
        "x floor",
        "ratio",
        "95% interval",
        "A/A",
        "verdict",
        *rivals,
        "age",
        right=("median", "x floor", "ratio", "95% interval", "A/A", *rivals, "age"),
    )
    for r in rows:
        verdict = Text("stale", "yellow") if r["stale"] else Text(r["verdict"], STYLE[r["verdict"]])
        low, high = r["interval"]
        others = [_rival(r, name) for name in rivals]
        table.add_row(
            f"{r['rung']:03d}",
            r["case"],
            r["regime"],
            r["clock"],
            milliseconds(r["median_ms"]),
            f"{r['times_floor']:.1f}",
            f"{r['ratio_to_parent']:.3f}",
            f"{low:.3f} {high:.3f}",
            f"±{100 * (r['noise'] - 1):.1f}%",
            verdict,
            *others,
            report.age(r["date"], now),
            style="dim" if r["stale"] else None,
        )
    return table


def _rival(row: dict, name: str) -> str:
    if name not in row["rivals"]:
        return "–"
    mark = "" if row["rival_clocks"].get(name) == row["clock"] else "*"
    return milliseconds(row["rivals"][name]) + mark


def precision_tables(rows: list[dict], console: Console | None = None, now: datetime | None = None) -> None:
    """Per device and form: our errors relative to fp64, and each over the least of fla's and cudnn's in the same run."""
    console, now = console or out, now or datetime.now(timezone.utc)
    names = tuple(f"{tensor.replace('final_', '')} {MEASURE[measure]}" for tensor, measure in MEASURES)
    for device in report.devices(rows):
        for form in FORMS:
            mine = [r for r in rows if (r["device"], r["form"]) == (device, form)]
            if not mine:
                continue
            title = f"{device}, form {form}: error relative to fp64 (and over the best of fla's and cudnn's)"
            table = _table(title, "rung", "case", "regime", *names, "in budget", "verdict", "age", right=(*names, "age"))
            for r in mine:
                figures = [_figure(f) for f in r["figures"]] or [Text("–", "dim")] * len(names)
                verdict = Text("stale", "yellow") if r["stale"] else Text(r["verdict"], STYLE[r["verdict"]])
                within = {True: Text("yes"), False: Text("no", STYLE["failed"]), None: Text("–", "dim")}[r["within_budget"]]
                table.add_row(f"{r['rung']:03d}", r["case"], r["regime"], *figures, within, verdict,
                              report.age(r["date"], now), style="dim" if r["stale"] else None)  # fmt: skip
            console.print(table)
    absent = dict.fromkeys(f"{'a rung' if n == 'rung' else n}: {why}" for r in rows for n, why in r["absent"].items())
    for line in absent:
        console.print(f"no error of {escape(line)}", style="dim")


def _figure(figure: dict) -> Text:
    ours, best = figure["ours"], figure["best_rival_error"]
    over = f" ({ours / best:.3f}x)" if ours is not None and best else ""
    return Text(("not finite" if ours is None else f"{ours:.2e}") + over, STYLE["worse"] if figure["worse"] else "")


def best_tables(standing: dict[str, list[dict]], console: Console | None = None) -> None:
    """What ladder.best.standing found: per device and form the best rung of each cell, then the geometric means."""
    console = console or out
    cells = standing["cells"]
    if not cells:
        console.print("No timing recorded yet, so no rung is best: `make rung N=1` on a machine with an NVIDIA GPU.")
    for device in report.devices(cells):
        for form in FORMS:
            mine = [c for c in cells if (c["device"], c["form"]) == (device, form)]
            if not mine:
                continue
            table = _table(f"{device}, form {form}: the best rung of each cell", "case", "regime", "rung", "ms", "best rival",
                           "its ms", "speed-up", "precision", right=("ms", "its ms", "speed-up"))  # fmt: skip
            for c in mine:
                if c["rung"] is None:
                    table.add_row(c["case"], c["regime"], Text(f"nothing current: {c['why']}", "yellow"), *["–"] * 5, style="dim")
                    continue
                slower = c["speedup"] is not None and c["speedup"] < 1
                table.add_row(
                    c["case"], c["regime"], c["name"], milliseconds(c["median_ms"]), c["best_rival"] or "none",
                    milliseconds(c["best_rival_ms"]) + ("*" if c["same_clock"] is False else ""),
                    Text(factor(c["speedup"]), STYLE["loss"] if slower else ""),
                    Text(c["precision"] or "–", STYLE.get(c["precision"], "dim")))  # fmt: skip
            console.print(table)
        for mean in (m for m in standing["means"] if m["device"] == device):
            if mean["cells"]:
                said = f"{factor(mean['speedup'])} over {mean['cells']} of {mean['of']} cells"
            else:
                said = f"none of {mean['of']} cells has a current time and a rival"
            console.print(f"geometric mean, {mean['form']}, {' and '.join(mean['regimes'])}: {said}")
    if any(c["same_clock"] is False for c in cells):
        console.print(OTHER_CLOCK)


def _check_table(checks: list[dict], now: datetime) -> Table:
    """One line per rung, architecture and place; what failed or did not run follows with its reason."""
    table = _table(
        "Checks",
        "rung",
        "arch",
        "where",
        "passed",
        "failed",
        "not run",
        "reason",
        "age",
        right=("passed", "failed", "not run", "age"),
    )
    for key in dict.fromkeys((c["rung"], c["arch"], c["device"]) for c in checks):
        mine = [c for c in checks if (c["rung"], c["arch"], c["device"]) == key]
        count = {o: sum(c["outcome"] == o for c in mine) for o in ("passed", "failed", "not run")}
        why = [f"{c['property']}: {'; '.join(c['reasons']) or c['outcome']}" for c in mine if c["outcome"] == "failed"]
        skipped = {reason for c in mine if c["outcome"] == "not run" for reason in c["reasons"]}
        why += [f"not run: {reason}" for reason in sorted(skipped)]
        if any(c["stale"] for c in mine):
            why.insert(0, "stale")
        table.add_row(
            f"{key[0]:03d}",
            key[1],
            key[2],
            str(count["passed"]),
            Text(str(count["failed"]), STYLE["failed"] if count["failed"] else "dim"),
            str(count["not run"]),
            escape("\n".join(why)),
            report.age(max(c["date"] for c in mine), now),
        )
    return table


def _footer(console: Console, table: list[dict], others: list[dict], problems: list[str]) -> None:
    if any(r["rivals"] and not all(r["rival_clocks"].get(n) == r["clock"] for n in r["rivals"]) for r in table):
        console.print(OTHER_CLOCK)
    absent = dict.fromkeys(f"{name}: {reason}" for r in table for name, reason in r["absent"].items())
    for line in absent:
        console.print(f"absent rival {escape(line)}", style="dim")
    for reason in dict.fromkeys(f"{r['rung']:03d}: {r['stale_reason']}" for r in [*table, *others] if r["stale"]):
        console.print(f"stale {escape(reason)}", style="yellow")
    for line in problems:
        console.print(f"unreadable record {escape(line)}", style="red")
