"""The tensor-core dot product: by hand, against a scalar model in exact rationals, and its error bounds."""

from fractions import Fraction

import numpy as np
import pytest

from emulator.hw import HwError, numerics
from emulator.hw.numerics import chain_error_bound, dot_accumulate, dot_error_bound, to_bf16_bits, widen

U = 2.0**-23


def one(a, b, c, **kw):
    """Scalar dot product of two lists plus c."""
    a, b = np.array([a], np.float32), np.array([b], np.float32).T
    return float(dot_accumulate(a, b, np.array([[c]], np.float32), **kw)[0, 0])


def test_terms_are_cut_25_bits_below_the_leading_exponent():
    ones = [1.0] * 4
    assert one([2.0**-26] * 4, ones, -1.0) == -1.0  # each 2^-26 is lost, though four of them are 2^-24
    assert one([2.0**-26] * 4, ones, -1.0, model="exact") == -1 + 2.0**-24
    assert one([2.0**-25] * 4, ones, -1.0) == -1 + 2.0**-23
    assert one([-(2.0**-26)] * 3 + [1.0], ones, 0.0) == 1.0  # towards zero, not down


def test_the_result_is_cut_towards_zero():
    assert one([U / 2 + U / 4], [1.0], 1.0) == 1.0  # to nearest it would be 1 + U
    assert one([U / 2 + U / 4], [1.0], 1.0, model="exact") == 1 + U
    assert one([-(U / 2 + U / 4)], [1.0], -1.0) == -1.0
    assert one([3.0], [0.5], -(2.0**-24)) == np.nextafter(np.float32(1.5), np.float32(0))


def test_products_are_not_normalised():
    """1.5 * 1.5 = 2.25 counts with exponent 0, so a term of 2^-25 beside it survives; a normalised product would drop
    it."""
    a, b = [1.5, -1.5, 2.0**-25], [1.5, 1.5, 1.0]
    assert one(a, b, 0.0) == 2.0**-25


def test_a_product_of_zero_does_not_lead():
    assert one([0.0, 2.0**-60], [2.0**100, 1.0], 0.0) == 2.0**-60


def test_k_is_fused_in_one_step():
    """Cancellation across all 16 products keeps the small one: no rounding in between."""
    a = [2.0**20] * 8 + [-(2.0**20)] * 7 + [2.0**-4]
    assert one(a, [1.0] * 16, -(2.0**20)) == 2.0**-4


def reference(a, b, c, kind):
    """The model of arXiv 2511.10909 in rationals, one output."""
    smallest = {"bf16": -126, "f16": -14, "tf32": -126}

    def exponent(x, low):
        return -126 if x == 0 else max(int(np.floor(np.log2(abs(float(x))))), low)

    terms = [(Fraction(float(c)), exponent(c, -126))]
    for x, y in zip(a, b):
        if x and y:
            terms.append(
                (Fraction(float(x)) * Fraction(float(y)), exponent(x, smallest[kind]) + exponent(y, smallest[kind]))
            )
    quantum = Fraction(2) ** (max(e for _, e in terms) - 25)
    total = sum(int(t / quantum) * quantum for t, _ in terms)  # int() cuts towards zero
    if total == 0:
        return 0.0
    step = Fraction(2) ** (max(exponent(float(total), -126), -126) - 23)
    return float(int(total / step) * step)


def operands(rng, kind, shape, spread):
    x = rng.standard_normal(shape) * 2.0 ** rng.integers(-spread, spread + 1, shape)
    if kind == "bf16":
        return widen(to_bf16_bits(x), "bf16")
    if kind == "f16":
        return np.clip(x, -65504, 65504).astype(np.float16).astype(np.float32)
    return widen(x.astype(np.float32).view(np.uint32), "tf32")


@pytest.mark.parametrize("kind, k", [("bf16", 16), ("f16", 16), ("tf32", 8), ("bf16", 8)])
@pytest.mark.parametrize("spread", [0, 3, 14, 60])
def test_against_rationals(kind, k, spread):
    if kind == "f16" and spread == 60:
        spread = 20  # reaches fp16's subnormals and its largest number
    rng = np.random.default_rng(spread)
    a, b = operands(rng, kind, (6, k), spread), operands(rng, kind, (k, 5), spread)
    a[0, ::3] = 0
    c = (rng.standard_normal((6, 5)) * 2.0 ** rng.integers(-spread, spread + 1, (6, 5))).astype(np.float32)
    got = dot_accumulate(a, b, c, kind)
    want = np.array([[reference(a[i], b[:, j], c[i, j], kind) for j in range(5)] for i in range(6)])
    assert got.dtype == np.float32 and np.array_equal(got.astype(np.float64), want)
    exact = np.array(
        [
            [
                float(
                    sum(Fraction(float(x)) * Fraction(float(y)) for x, y in zip(a[i], b[:, j]))
                    + Fraction(float(c[i, j]))
                )
                for j in range(5)
            ]
            for i in range(6)
        ]
    )
    error, bound = np.abs(want - exact), dot_error_bound(a, b, c, kind)
    assert (error <= bound).all()
    assert (error > bound / 200).any()  # the bound says something


def test_fp32_subnormal_results_are_kept():
    assert one([2.0**-100], [2.0**-40], 0.0) == 2.0**-140
    assert one([2.0**-100], [2.0**-60], 2.0**-149) == 2.0**-149


def test_overflow_and_specials():
    big = float(np.float32(2.0**127))
    assert one([big, big], [1.0, 1.0], 0.0, kind="tf32") == np.inf
    biggest = float(np.finfo(np.float32).max)
    assert one([2.0**102], [1.0], biggest) == biggest  # below 2^128: cut to the largest number
    assert one([np.inf], [1.0], 1.0) == np.inf and one([-np.inf], [1.0], 1.0) == -np.inf
    for args in (([np.inf], [0.0], 0.0), ([np.inf], [1.0], -np.inf), ([1.0], [1.0], np.nan)):
        d = dot_accumulate(*(np.array([[x if np.isscalar(x) else x[0]]], np.float32) for x in args))
        assert d.view(np.uint32)[0, 0] == 0x7FFFFFFF


def test_special_values_leave_their_neighbours_alone():
    rng = np.random.default_rng(0)
    a, b, c = operands(rng, "bf16", (4, 16), 2), operands(rng, "bf16", (16, 8), 2), np.zeros((4, 8), np.float32)
    clean = dot_accumulate(a, b, c)
    a[1, 3] = np.nan
    c[2, 5] = np.inf
    got = dot_accumulate(a, b, c)
    assert np.isnan(got[1]).all() and got[2, 5] == np.inf
    keep = np.ones((4, 8), bool)
    keep[1], keep[2, 5] = False, False
    assert np.array_equal(got[keep], clean[keep])


def test_fp16_result_rounds_to_nearest_even():
    d = dot_accumulate(np.float32([[1.0]]), np.float32([[2.0**-11]]), np.float16([[1.0]]), "f16", out="f16")
    assert d.dtype == np.float16 and d[0, 0] == 1.0
    d = dot_accumulate(np.float32([[1.0]]), np.float32([[3 * 2.0**-11]]), np.float16([[1.0]]), "f16", out="f16")
    assert d[0, 0] == np.float16(1 + 2.0**-9)


def test_fp16_subnormal_accumulator_counts_as_a_normal():
    """c = 2^-24 stands with exponent -14, so a product of 2^-40 is below its bit 2^-39 and is cut; 2^-39 is kept."""
    a = np.float32([[2.0**-20, -(2.0**-20)]] * 2)
    b = np.float32([[2.0**-20, 2.0**-19]] * 2) * np.float32([[1, 1], [0, 0]])
    c = np.full((2, 2), 2.0**-24, np.float16)
    assert dot_accumulate(a, b, c, "f16", out="f16").tolist() == [[2.0**-24] * 2] * 2
    one_cut, one_kept = numerics._fused(a, b, c.astype(np.float32), "f16", "f16")[0]
    assert (one_cut, one_kept) == (2.0**-24, 2.0**-24 + 2.0**-39)


def test_tf32_ignores_its_low_13_bits():
    a = np.uint32([[0x3F801FFF]]).view(np.float32)
    assert dot_accumulate(a, np.float32([[1.0]]), None, "tf32")[0, 0] == 1.0


def test_batches():
    rng = np.random.default_rng(3)
    a, b, c = (
        operands(rng, "bf16", (3, 4, 16), 2),
        operands(rng, "bf16", (3, 16, 8), 2),
        rng.standard_normal((3, 4, 8)).astype(np.float32),
    )
    got = dot_accumulate(a, b, c)
    for i in range(3):
        assert np.array_equal(got[i], dot_accumulate(a[i], b[i], c[i]))


@pytest.mark.parametrize("kind, step", [("bf16", 16), ("f16", 16), ("tf32", 8)])
@pytest.mark.parametrize("spread", [0, 8])
def test_chain_bound(kind, step, spread):
    rng = np.random.default_rng(9)
    a, b, c = (
        operands(rng, kind, (16, 128), spread),
        operands(rng, kind, (128, 16), spread),
        rng.standard_normal((16, 16)).astype(np.float32),
    )
    d = c
    for k in range(0, 128, step):
        d = dot_accumulate(a[:, k : k + step], b[k : k + step], d, kind)
    error = np.abs(d - (a.astype(np.float64) @ b.astype(np.float64) + c))
    bound = chain_error_bound(a, b, c, kind)
    assert (error <= bound).all() and (error > bound / 1000).any()


def test_bf16_rounding():
    x = np.float32([1 + 2.0**-8, 1 + 3 * 2.0**-8, -1 - 2.0**-8 - 2.0**-20, np.inf, np.nan, 3.4e38])
    assert to_bf16_bits(x).tolist() == [0x3F80, 0x3F82, 0xBF81, 0x7F80, 0x7FFF, 0x7F80]


def test_unpack_halves():
    assert numerics.unpack_halves(np.uint32([[0x22221111], [0x44443333]])).tolist() == [
        [0x1111],
        [0x2222],
        [0x3333],
        [0x4444],
    ]


def test_errors():
    x = np.zeros((1, 1), np.float32)
    for kw in (dict(kind="e4m3"), dict(model="rn"), dict(out="bf16")):
        with pytest.raises(HwError, match="accepted"):
            dot_accumulate(x, x, x, **kw)
