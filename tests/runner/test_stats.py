"""Verdicts on samples whose true ratio is known."""

from __future__ import annotations

import numpy as np
import pytest

from ladder import stats


def cell(rng, ratio=1.0, control=1.0, rounds=15, noise=0.01, ms=1.0, drift=0.0, name="c"):
    """Times of one cell: multiplicative noise, and a drift that all callees of a round share."""
    shared = ms * np.exp(drift * np.linspace(0, 1, rounds))
    draw = lambda factor: (shared * factor * np.exp(rng.normal(0, noise, rounds))).tolist()  # noqa: E731
    return {"case": name, "regime": "slow", "form": "pre", "samples_ms": {"parent": draw(1), "rung": draw(ratio), "control": draw(control)}}


def many(rng, n=24, **kw):
    return [cell(rng, name=f"c{i}", **kw) for i in range(n)]


@pytest.fixture
def rng():
    return np.random.default_rng(11)


def test_interval_covers_the_true_ratio(rng):
    covered = sum(e.low <= 0.9 <= e.high for e in (
        stats.estimate(stats.log_ratios(c["samples_ms"]["rung"], c["samples_ms"]["parent"])) for c in many(rng, 200, ratio=0.9)))
    assert 175 <= covered <= 200  # a 95% interval of 15 rounds; the percentile method is a little short


@pytest.mark.parametrize(("ratio", "verdict"), [(0.9, stats.WIN), (1.1, stats.LOSS), (1.0, stats.NOISE)])
def test_known_ratio(rng, ratio, verdict):
    results, overall = stats.judge(many(rng, ratio=ratio))
    assert {r.verdict for r in results} == {verdict}
    assert overall.verdict == verdict and overall.rung.ratio == pytest.approx(ratio, rel=0.01)
    assert overall.rung.low <= overall.rung.ratio <= overall.rung.high


def test_shared_drift_cancels(rng):
    """Clocks that fall by a third within the run: the within-round ratios do not see it, medians of times would."""
    results, _ = stats.judge([cell(rng, ratio=0.97, drift=0.3, rounds=21, noise=0.002)])
    assert results[0].verdict == stats.WIN and results[0].rung.ratio == pytest.approx(0.97, rel=0.003)


def test_copies_rarely_lose(rng):
    """An unchanged copy, 40 runs of 36 cells: overall always inside noise, hardly a lost cell in all of them."""
    lost = 0
    for _ in range(40):
        results, overall = stats.judge(many(rng, 36))
        assert overall.verdict == stats.NOISE
        lost += sum(r.verdict != stats.NOISE for r in results)
    assert lost <= 3, f"{lost} of 1440 cells of copies have a verdict"


def test_noisy_control_hides_a_small_gain(rng):
    """The same 4% gain: a win where copies agree, inside noise where two copies differ by 6%."""
    quiet, _ = stats.judge([cell(rng, ratio=0.96, noise=0.003)])
    loud, _ = stats.judge([cell(rng, ratio=0.96, control=1.06, noise=0.003)])
    assert (quiet[0].verdict, loud[0].verdict) == (stats.WIN, stats.NOISE)
    assert loud[0].noise > 1.05


def test_controls_of_other_cells_count(rng):
    """One cell's control happens to agree; the run's other controls are off by 5%, and so is what this machine can tell."""
    cells = [cell(rng, control=1.05, noise=0.002, name=f"c{i}") for i in range(7)]
    alone = cell(rng, ratio=0.97, noise=0.002, name="alone")
    assert stats.judge([alone])[0][0].verdict == stats.WIN
    assert stats.judge([alone, *cells])[0][0].verdict == stats.NOISE


def test_one_tick_of_the_clock_is_noise():
    """10 us quantised to half a microsecond, no spread at all: one tick is not a win, two are."""
    def quantised(ms):
        return {"case": "c", "regime": "slow", "form": "pre",
                "samples_ms": {"parent": [0.01] * 15, "control": [0.01] * 15, "rung": [ms] * 15}}  # fmt: skip

    assert stats.judge([quantised(0.0096)])[0][0].verdict == stats.NOISE
    assert stats.judge([quantised(0.0090)])[0][0].verdict == stats.WIN


def test_win_with_a_lost_cell_is_mixed(rng):
    cells = [*many(rng, 11, ratio=0.8), cell(rng, ratio=1.2, name="bad")]
    _, overall = stats.judge(cells)
    assert overall.verdict == stats.MIXED and overall.lost == ("bad/slow/pre",)


def test_same_samples_give_the_same_verdict(rng):
    cells = many(rng, 6, ratio=0.99)
    assert stats.judge(cells) == stats.judge(cells)


@pytest.mark.parametrize(("a", "b"), [([1.0], [1.0, 2.0]), ([], []), ([1.0, float("nan")], [1.0, 1.0]), ([0.0], [1.0])])
def test_bad_samples_are_refused(a, b):
    with pytest.raises(ValueError, match="samples: .*accepted"):
        stats.log_ratios(a, b)
