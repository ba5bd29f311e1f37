"""Verdicts from paired times: within-round ratios, bootstrap intervals, and the noise that the A/A control shows.

A ratio is time over the parent's time in the same round: below 1 is faster. All averaging is over logarithms, so that
"twice as fast" and "twice as slow" weigh the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

CONFIDENCE = 0.95
RESAMPLES = 2000
TICK_MS = 0.0005  # resolution of cudaEventElapsedTime (CUDA Runtime API, Event Management)
POOL_FROM = 5  # cells from which the controls of a whole run say something about each other
WIN, LOSS, NOISE, MIXED = "win", "loss", "inside noise", "mixed"


@dataclass(frozen=True)
class Estimate:
    """A ratio and its bootstrap 95% interval."""

    ratio: float
    low: float
    high: float

    @property
    def spread(self) -> float:
        """How far from 1 the interval reaches, as a logarithm (sign dropped)."""
        return max(abs(math.log(self.low)), abs(math.log(self.high)))


@dataclass(frozen=True)
class CellResult:
    """One cell's verdict. noise: the factor (1.02 = 2%) inside which a ratio says nothing."""

    case: str
    regime: str
    form: str
    rung: Estimate
    control: Estimate
    noise: float
    verdict: str


@dataclass(frozen=True)
class Overall:
    """A rung's verdict over all its cells: the geometric mean of the cells' ratios, and which cells lost."""

    rung: Estimate
    control: Estimate
    noise: float
    verdict: str
    lost: tuple[str, ...]


def log_ratios(samples: Sequence[float], parent: Sequence[float]) -> np.ndarray:
    """Logarithms of the within-round ratios. Raises ValueError for unpaired or non-positive times."""
    a, b = np.asarray(samples, float), np.asarray(parent, float)
    if a.shape != b.shape or a.ndim != 1 or a.size == 0:
        raise ValueError(f"samples: given {a.size} and {b.size} times, accepted: one per round of both")
    if not (np.isfinite(a).all() and np.isfinite(b).all() and (a > 0).all() and (b > 0).all()):
        raise ValueError("samples: accepted: finite times above zero")
    return np.log(a) - np.log(b)


def estimate(*cells: np.ndarray) -> Estimate:
    """Geometric mean over cells of the median ratio, with its interval: the rounds of each cell are resampled."""

    def statistic(*samples: np.ndarray, axis: int = -1) -> np.ndarray:
        return np.mean([np.median(x, axis=axis) for x in samples], axis=0)

    centre = float(statistic(*cells))
    if all(np.ptp(x) == 0 for x in cells):  # nothing to resample: scipy would warn and return NaN
        low = high = centre
    else:
        from scipy.stats import bootstrap  # two seconds, which only who needs a verdict shall wait for

        interval = bootstrap(
            cells, statistic, vectorized=True, paired=False, method="percentile", n_resamples=RESAMPLES,
            confidence_level=CONFIDENCE, rng=np.random.default_rng(0)).confidence_interval  # fmt: skip
        low, high = float(interval.low), float(interval.high)
    return Estimate(math.exp(centre), math.exp(low), math.exp(high))


def cell_verdict(rung: Estimate, noise: float) -> str:
    """win or loss where the whole interval lies beyond the noise (a factor above 1), else inside noise."""
    if rung.high < 1 / noise:
        return WIN
    return LOSS if rung.low > noise else NOISE


def judge(cells: Sequence[dict[str, Any]]) -> tuple[list[CellResult], Overall | None]:
    """Verdicts of a bench record's cells and of the rung as a whole (None without cells).

    A cell's noise is the farthest its control's interval reaches from 1, but at least what controls reach elsewhere in
    the run (the 95th percentile of their medians, from POOL_FROM cells on) and one tick of the clock. A rung wins when
    the interval of its geometric mean lies beyond the control's and no cell loses; `mixed` is that with a lost cell.
    """
    logs = [{n: log_ratios(c["samples_ms"][n], c["samples_ms"]["parent"]) for n in ("rung", "control")} for c in cells]
    controls = [estimate(x["control"]) for x in logs]
    pooled = _pooled([math.log(c.ratio) for c in controls])
    results = []
    for cell, x, control in zip(cells, logs, controls):
        tick = math.log1p(TICK_MS / float(np.median(cell["samples_ms"]["parent"])))
        noise = math.exp(max(control.spread, pooled, tick))
        rung = estimate(x["rung"])
        verdict = cell_verdict(rung, noise)
        results.append(CellResult(cell["case"], cell["regime"], cell["form"], rung, control, noise, verdict))
    if not results:
        return [], None
    rung, control = (estimate(*(x[n] for x in logs)) for n in ("rung", "control"))
    noise = math.exp(max(control.spread, math.log1p(TICK_MS / max(np.median(c["samples_ms"]["parent"]) for c in cells))))
    lost = tuple(f"{r.case}/{r.regime}/{r.form}" for r in results if r.verdict == LOSS)
    verdict = cell_verdict(rung, noise)
    return results, Overall(rung, control, noise, MIXED if verdict == WIN and lost else verdict, lost)


def _pooled(log_control_ratios: Sequence[float]) -> float:
    if len(log_control_ratios) < POOL_FROM:
        return 0.0
    return float(np.quantile(np.abs(log_control_ratios), 0.95))
