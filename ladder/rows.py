"""Rows for scripts: what `bench --json`, `precision --json` and `report --json` print."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

from ladder import noted, stats

MEASURES = tuple((tensor, measure) for tensor in ("o", "final_state") for measure in ("worst_row", "l2"))
JUDGED_BY = ("fla", "cudnn")  # whose errors ours must not exceed: the rivals of these names and of variants of them


def bench_rows(record: dict[str, Any], stale: str | None = None) -> list[dict[str, Any]]:
    """One row per cell of a bench record. stale: why the record is stale, if it is.

    ratio_to_parent is time over the parent's time (below 1 is faster), interval its bootstrap 95% interval, noise the
    factor that the A/A control shows; rivals in milliseconds by the rung's clock where they have one, all clocks in
    rival_clocks ("noted": scaled from a table, ladder.noted).
    """
    results, _ = stats.judge(record["cells"])
    return [_row(record, cell, result, stale) for cell, result in zip(record["cells"], results)]


def _row(record: dict[str, Any], cell: dict[str, Any], result: stats.CellResult, stale: str | None) -> dict[str, Any]:
    median = {name: statistics.median(times) for name, times in cell["samples_ms"].items()}
    impostors = _impostors(cell)
    rivals = {name: ms for name, ms in median.items() if name not in ("rung", "parent", "control") and name not in impostors}
    scaled = noted.rivals(record, cell)
    return {
        "rung": record["number"], "name": record["rung"], "case": cell["case"], "regime": cell["regime"],
        "form": cell["form"], "arch": record["device"].get("arch"), "device": record["device"].get("name"),
        "clock": cell["clocks"]["rung"], "median_ms": median["rung"], "floor_ms": cell["floor_ms"],
        "times_floor": median["rung"] / cell["floor_ms"], "ratio_to_parent": result.rung.ratio,
        "interval": [result.rung.low, result.rung.high], "control": result.control.ratio,
        "control_interval": [result.control.low, result.control.high], "noise": result.noise,
        "verdict": result.verdict, "stale": bool(stale), "stale_reason": stale, "rivals": rivals | scaled,
        "rival_clocks": {name: cell["clocks"][name] for name in rivals} | dict.fromkeys(scaled, noted.CLOCK),
        "absent": cell.get("absent", {}) | impostors,
        "date": record["date"],
    }  # fmt: skip


def _impostors(cell: dict[str, Any]) -> dict[str, str]:
    """Rivals whose launched kernels, as recorded, are not the ones that the adapter names today, and why they do not
    count: a dispatcher ran another engine under their name."""
    from ladder import witness

    from kernels.kda import rivals

    out = {}
    for rival in rivals.ALL:
        launched = cell.get("launches", {}).get(rival.name)
        if launched and (lacking := witness.missing(rival.kernels, launched)):
            out[rival.name] = f"another kernel ran: {', '.join(lacking)} expected, launched {', '.join(launched)[:120]}"
    return out


def precision_rows(record: dict[str, Any], stale: str | None = None) -> list[dict[str, Any]]:
    """One row per cell of a precision record. stale: why the record is stale, if it is."""
    return [precision_row(record, cell, stale) for cell in record["precision"]]


def precision_row(record: dict[str, Any], cell: dict[str, Any], stale: str | None) -> dict[str, Any]:
    """figures: for the worst row and the L2 error of o and of the final state, our error relative to fp64, the least of
    fla's and cudnn's variants in the same run, and whether ours is worse, to three digits. verdict: "no worse" if none of the four is,
    else "worse"; "no rival" and "not run" where there is nothing to compare. within_budget: whether the worst rows are
    inside the budget of `check`; None where the cell has none.
    """
    errors = dict(cell["errors"])
    own = errors.pop("rung", None)
    figures = [_figure(tensor, measure, own, errors) for tensor, measure in MEASURES] if own else []
    return {
        "rung": record["number"], "name": record["rung"], "case": cell["case"], "regime": cell["regime"],
        "form": cell["form"], "arch": record["device"].get("arch"), "device": record["device"].get("name"),
        "figures": figures, "verdict": _precision_verdict(figures), "within_budget": _within(own, cell["budgets"]),
        "budgets": cell["budgets"], "rivals": errors, "absent": cell.get("absent") or {}, "seed": cell["seed"],
        "stale": bool(stale), "stale_reason": stale, "date": record["date"],
    }  # fmt: skip


def _figure(tensor: str, measure: str, own: dict[str, Any], rivals: dict[str, Any]) -> dict[str, Any]:
    ours = own[tensor][measure]
    theirs = {name: e[tensor][measure] for name, e in rivals.items()
              if name.split("-")[0] in JUDGED_BY and e[tensor][measure] is not None}  # fmt: skip
    best = min(theirs, key=theirs.__getitem__) if theirs else None
    return {
        "tensor": tensor, "measure": measure, "ours": ours, "best_rival": best, "best_rival_error": theirs.get(best),
        "worse": (ours is None or _shown(ours) > _shown(theirs[best])) if theirs else None,
    }  # fmt: skip


def _shown(error: float) -> float:
    """To the three digits that are shown."""
    return float(f"{error:.2e}")


def _precision_verdict(figures: list[dict[str, Any]]) -> str:
    if not figures:
        return "not run"
    if all(figure["worse"] is None for figure in figures):
        return "no rival"
    return "worse" if any(figure["worse"] for figure in figures) else "no worse"


def _within(own: dict[str, Any] | None, budgets: dict[str, float | None]) -> bool | None:
    if own is None or None in budgets.values():
        return None
    worst = {tensor: own[tensor]["worst_row"] for tensor in budgets}
    return all(error is not None and error <= budgets[tensor] for tensor, error in worst.items())


def sum_hostile(rows: Iterable[dict[str, Any]]) -> dict[str, int] | None:
    """How many hostile cases passed, were refused, inherited from upstream, or failed; None where none was tried."""
    tallies = [row["hostile"] for row in rows if row.get("hostile")]
    return {kind: sum(tally[kind] for tally in tallies) for kind in tallies[0]} if tallies else None
