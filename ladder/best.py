"""Which rung is best: per timed cell (`ladder best`), and for the arguments of a call (`ladder.chunk_kda`).

Both read the committed records and nothing else. Only rungs that are current or won (report.BAR_STATUS) and fail no
check can be best, and a stale measurement counts for nothing.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ladder import report
from ladder.manifest import FORMS, Ladder

BAR_CASES = ("t2048_h12", "t8192_h24", "h64", "h96", "b8_h16_t4096", "t32768_h32")  # where all rivals were measured
BAR_REGIMES = ("strong", "slow")
BAR_FORM = "prod"
SHOWN = ("rung", "name", "median_ms", "clock", "date", "best_rival", "best_rival_ms", "same_clock", "speedup")  # of a best row
Row = dict[str, Any]


def standing(records: Sequence[Row], ladder: Ladder, stale: report.Stale | None = None) -> dict[str, list[Row]]:
    """{"cells": one row per device and cell, "means": the geometric means of the bar per device}.

    A cell's row: device, case, regime, form, the best rung (`rung`, `name`, `median_ms`, `clock`, `date`), the best
    rival of the same run (`best_rival`, `best_rival_ms`, `same_clock`), `speedup` (the rival's time over ours), and
    `precision`, its current verdict against the rivals' errors, if there is one. Where no rung can be best, all of these
    are None and `why` says why. A mean: of the speed-ups of `cells` out of `of` cells, the others having no current time
    or rival.
    """
    table = report.rows(records, ladder, stale)
    failing = report.failing_rungs(report.check_rows(records, ladder, stale))
    top = report.best(table, ladder, failing)
    cells = [_cell(key, top.get(key), table, ladder, failing) for key in _cells(table, ladder)]
    means = [_mean(device, regimes, cells) for device in report.devices(table) for regimes in (BAR_REGIMES, ("slow",))]
    return {"cells": cells, "means": means}


def _cells(table: Sequence[Row], ladder: Ladder) -> list[tuple[str, str, str, str]]:
    """(device, case, regime, form): the GPU cells of ladder.yaml, form by form, then others with a current time."""
    listed = [(name, regime, form) for form in FORMS for name, entry in ladder.cases.items() if entry.gpu and form in entry.forms
              for regime in entry.regimes]  # fmt: skip
    keys = {}
    for device in report.devices(table):
        timed = [(r["case"], r["regime"], r["form"]) for r in table if r["device"] == device and not r["stale"]]
        keys |= dict.fromkeys((device, *key) for key in [*listed, *timed])
    return list(keys)


def _cell(key: tuple[str, str, str, str], row: Row | None, table: Sequence[Row], ladder: Ladder, failing: Collection[int]) -> Row:
    out = dict(zip(("device", "case", "regime", "form"), key))
    if row is None:
        return out | dict.fromkeys((*SHOWN, "precision")) | {"why": _why_none(key, table, ladder, failing)}
    own = row["precision"]
    verdict = own["verdict"] if own and not own["stale"] else None
    return out | {name: row[name] for name in SHOWN} | {"precision": verdict, "why": None}


def _why_none(key: tuple, table: Sequence[Row], ladder: Ladder, failing: Collection[int]) -> str:
    reasons = []
    for row in (r for r in table if (r["device"], r["case"], r["regime"], r["form"]) == key):
        status = ladder.rungs[row["rung"]].status
        what = ("stale" if row["stale"] else "failing a check" if row["rung"] in failing
                else f"a {status}" if status == "draft" else status)  # fmt: skip
        reasons.append(f"{row['rung']:03d} is {what}")
    return ", ".join(reasons) or "never timed"


def _mean(device: str, regimes: Sequence[str], cells: Sequence[Row]) -> Row:
    speedups = [c["speedup"] for c in cells if c["device"] == device and c["case"] in BAR_CASES
                and c["regime"] in regimes and c["form"] == BAR_FORM and c["speedup"]]  # fmt: skip
    return {"device": device, "form": BAR_FORM, "regimes": list(regimes), "speedup": report.geomean(speedups),
            "cells": len(speedups), "of": len(BAR_CASES) * len(regimes)}  # fmt: skip


@dataclass(frozen=True)
class Timed:
    """A current time of a rung: where, at which cell (shape: B, T, HV, K, V of its case), in milliseconds."""

    rung: int
    device: str
    arch: str
    case: str
    regime: str
    form: str
    shape: dict[str, int]
    ms: float


def timed(records: Sequence[Row], ladder: Ladder, stale: report.Stale | None = None) -> list[Timed]:
    """Every current time whose record names its shape."""
    out = []
    for rec, index, why in report.newest(records, "bench", "cells", ladder, stale):
        cell, device = rec["cells"][index], rec["device"]
        if why is None and cell.get("shape"):
            out.append(Timed(rec["number"], device.get("name"), device.get("arch"), cell["case"], cell["regime"], cell["form"],
                             cell["shape"], statistics.median(cell["samples_ms"]["rung"])))  # fmt: skip
    return out


def pick(p: Any, arch: str, device: str | None, eligible: Collection[int], times: Iterable[Timed]) -> tuple[int, str]:
    """(rung, why) for a Problem on a device of `arch`, among the rungs that can take it (at least one).

    The rung with the least time at the measured case nearest to the problem. Measured: currently, on the device of
    this name, else on the first other one of its architecture; in the form and the regimes that arguments like these
    can mean (`alike`), all of them, of which the geometric mean counts, because shapes cannot tell strong gates from
    slow ones. Nearest: the least `distance`. Where nothing is measured, the highest number.
    """
    form, regimes = alike(p)
    known = [t for t in times if t.rung in eligible and t.arch == arch and t.form == form and t.regime in regimes]
    here = device if any(t.device == device for t in known) else next((t.device for t in known), None)
    found: dict[str, dict[int, dict[str, float]]] = {}
    shapes = {}
    for t in (t for t in known if t.device == here):
        found.setdefault(t.case, {}).setdefault(t.rung, {})[t.regime] = t.ms
        shapes[t.case] = t.shape
    means = {case: {rung: report.geomean(ms.values()) for rung, ms in rungs.items() if len(ms) == len(regimes)}
             for case, rungs in found.items()}  # fmt: skip
    cases = [case for case, rungs in means.items() if rungs]
    if not cases:
        return max(eligible), "the highest-numbered rung that takes it; none has a current time for such arguments"
    case = min(cases, key=lambda c: distance(p, shapes[c]))
    rung = min(means[case], key=means[case].__getitem__)
    return rung, (f"{means[case][rung]:.3g} ms ({' and '.join(regimes)}, {form}) at {case} on {here}, the nearest measured "
                  f"case, the least of {len(means[case])} rungs timed there")  # fmt: skip


def alike(p: Any) -> tuple[str, tuple[str, ...]]:
    """(form, regimes) of the cells whose arguments look like the problem's: gate inside or pre-computed, bounded or not."""
    return "pre" if p.gate == "log" else "prod", ("strong", "slow") if p.safe_gate else ("init",)


def distance(p: Any, shape: dict[str, int]) -> float:
    """How far a problem is from a case: |log2| of the ratios of T, of B x HV (chains that run side by side), of K and
    of V, summed."""
    pairs = ((p.T, shape["T"]), (p.B * p.HV, shape["B"] * shape["HV"]), (p.K, shape["K"]), (p.V, shape["V"]))
    return sum(abs(math.log2(ours / theirs)) for ours, theirs in pairs)
