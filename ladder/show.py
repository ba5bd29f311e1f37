"""Progress and tables on the terminal. Progress and remarks go to standard error, results to standard output."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from ladder import stats
from ladder.rows import bench_rows, sum_hostile

WIDTH = None if sys.stdout.isatty() else 160  # a file has no width of its own
out = Console(highlight=False, width=WIDTH)
err = Console(stderr=True, highlight=False)
STYLE = {"passed": "green", "failed": "bold red", "not run": "yellow", stats.WIN: "green", stats.LOSS: "bold red",
         stats.NOISE: "", stats.MIXED: "yellow"}  # fmt: skip


def line(text: str) -> None:
    err.print(text, soft_wrap=True, markup=False)


@contextmanager
def progress(label: str, total: int) -> Iterator[Callable[[str], None]]:
    """A bar on a terminal, one plain line per step elsewhere; the yielded function marks one step done."""
    if not err.is_terminal:
        count = iter(range(1, 1 << 62))
        yield lambda text: line(f"{label} {next(count)}/{total}: {text}")
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True) as bar:
        task = bar.add_task(label, total=total)
        yield lambda text: bar.update(task, advance=1, description=text[:90])


def check_table(rows: Sequence[dict[str, Any]]) -> None:
    """Per rung and architecture: a line of what passed, one per failure, one per reason why something was not run, and one
    for what was inherited."""
    table = Table(box=None, pad_edge=False)
    for column in ("rung", "arch", "outcome", "property", "reason"):
        table.add_column(column, overflow="fold", min_width=len(column))
    groups: dict[tuple[str, str, str, str], list[dict[str, Any]]] = {}
    for row in rows:
        told = "inherited from" in row["reason"]  # what a rung has from fla or the compiler is said though it passed
        reason = "" if row["outcome"] == "passed" and not told else _located(row) if row["outcome"] == "failed" else row["reason"]
        groups.setdefault((row["name"], row["arch"], row["outcome"], reason), []).append(row)
    for (name, arch, outcome, reason), group in groups.items():
        counts: dict[str, int] = {}
        for row in group:
            counts[row["property"]] = counts.get(row["property"], 0) + 1
        properties = ", ".join(p if n == 1 else f"{p} ({n} cells)" for p, n in counts.items())
        table.add_row(name, arch, f"[{STYLE[outcome]}]{outcome}[/]", properties, _plain(reason))
    out.print(table)
    tally = {o: sum(r["outcome"] == o for r in rows) for o in ("passed", "failed", "not run")}
    out.print(", ".join(f"{n} {o}" for o, n in tally.items()))
    if cases := sum_hostile(rows):
        out.print("hostile cases: " + ", ".join(f"{n} {kind}" for kind, n in cases.items()))


def step(row: dict[str, Any]) -> str:
    """What has just been decided, for the progress line."""
    cell = f" {row['case']}/{row['regime']}/{row['form']}" if row["case"] else ""
    return f"{row['name']} {row['arch']} {row['property']}{cell}: {row['outcome']}"


def _located(row: dict[str, Any]) -> str:
    return f"{row['case']}/{row['regime']}/{row['form']}: {row['reason']}" if row["case"] else row["reason"]


def _plain(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def build_table(rows: Sequence[dict[str, Any]]) -> None:
    """Registers and spills per thread, shared memory per CTA, of every kernel that was compiled."""
    table = Table(box=None, pad_edge=False)
    for column in ("rung", "arch", "kernel", "registers", "spilled bytes", "shared bytes"):
        table.add_column(column, justify="left" if column in ("rung", "arch", "kernel") else "right", overflow="fold")
    for row in sorted(rows, key=lambda r: (r["rung"], r["arch"])):
        if row["error"]:
            table.add_row(row["name"], row["arch"], f"[bold red]{_plain(row['error'])}[/]")
            continue
        spilled = row["spilled"]
        table.add_row(row["name"], row["arch"], row["kernel"], str(row["registers"]),
                      f"[bold red]{spilled}[/]" if spilled else "0", str(row["shared"]))  # fmt: skip
    out.print(table)


def bench_table(record: dict[str, Any]) -> None:
    """A record's cells with their verdicts, the A/A control's spread beside each, and the rung's own verdict last."""
    rows = bench_rows(record)
    _, overall = stats.judge(record["cells"])
    rivals = list(dict.fromkeys(name for row in rows for name in row["rivals"]))
    table = Table(title=f"{record['rung']} against {record['parent']} on {record['device'].get('name')}, "
                        f"copy rate {record['copy_gbps'] / 1000:.2f} TB/s", title_justify="left", box=None)  # fmt: skip
    for column in ("cell", "clock", "ms", "x floor", "ratio to parent", "95%", "A/A control", "verdict", *rivals):
        table.add_column(column, justify="left" if column in ("cell", "clock", "verdict") else "right")
    for row in rows:
        low, high = row["interval"]
        c_low, c_high = row["control_interval"]
        other = (f"{row['rivals'][n]:.3f} {row['rival_clocks'][n][0]}" if n in row["rivals"] else "-" for n in rivals)
        table.add_row(
            f"{row['case']}/{row['regime']}/{row['form']}", row["clock"], f"{row['median_ms']:.4f}",
            f"{row['times_floor']:.1f}", f"{row['ratio_to_parent']:.3f}", f"{low:.3f}-{high:.3f}",
            f"{c_low:.3f}-{c_high:.3f}", f"[{STYLE[row['verdict']] or 'default'}]{row['verdict']}[/]", *other)  # fmt: skip
    out.print(table)
    if overall:
        lost = f", lost in {', '.join(overall.lost)}" if overall.lost else ""
        out.print(f"{record['rung']}: {overall.verdict}: geometric mean {overall.rung.ratio:.3f} "
                  f"({overall.rung.low:.3f}-{overall.rung.high:.3f}) of the parent's time, control "
                  f"{overall.control.low:.3f}-{overall.control.high:.3f}{lost}", markup=False)  # fmt: skip
    reasons = dict.fromkeys(f"{name}: {why}" for row in rows for name, why in row["absent"].items())
    for reason in reasons:
        out.print(f"absent: {reason}", markup=False)
