"""Arithmetic on f32 and on packed halves: one rounding, subnormals, infinities, NaN (PTX ISA, "Floating-Point Instructions",
"Half Precision Floating-Point Instructions"). The expected values are rational arithmetic, rounded once.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from .conversions import encoded, rounded
from .program import Bitwise, floats, generator, lanes

SPAN = 40


def nearest32(q: Fraction) -> float:
    """q rounded to float32, to nearest even, subnormals kept."""
    if q == 0:
        return 0.0
    e = max((abs(q.numerator).bit_length() - q.denominator.bit_length()), -126)
    while abs(q) < Fraction(2) ** e and e > -126:
        e -= 1
    while abs(q) >= Fraction(2) ** (e + 1):
        e += 1
    step = Fraction(2) ** (e - 23)
    units = round(q / step)  # Fraction rounds half to even
    return float(np.float32(np.inf)) * (1 if q > 0 else -1) if abs(units * step) >= Fraction(2) ** 128 else float(units * step)


def arithmetic(name: str, arity: int, fn, low: int = -SPAN, high: int = SPAN):
    """fn on Fractions where all inputs are finite; on floats (IEEE 754 in float64) where one is not, or the result is zero."""

    def manual(inputs):
        columns = [inputs[n] for n in "abc"[:arity]]
        out = np.empty(len(columns[0]), np.float32)
        with np.errstate(all="ignore"):
            wide = fn(*(c.astype(np.float64) for c in columns))
            for i, values in enumerate(zip(*columns, strict=True)):
                exact = fn(*(Fraction(float(v)) for v in values)) if np.isfinite(values).all() else 0
                out[i] = np.copysign(nearest32(exact), wide[i]) if exact else wide[i]
        return {"y": out}

    given = {n: floats(f"{name} {n}", 1024, low, high) for n in "abc"[:arity]}
    rng = generator(name)
    for n in given:  # specials against specials, and sums that cancel
        given[n][:512] = rng.permutation(np.concatenate([given[n][:32]] * 16))
    if arity == 3:
        with np.errstate(all="ignore"):
            given["c"][768:] = -(given["a"][768:] * given["b"][768:])
    return lanes(name, f"{name} y, {', '.join('abc'[:arity])};", given, {"y": np.float32}, manual, Bitwise(nan=True))


def minmax(name: str, pick, nan: bool):
    """The number if one operand is NaN, unless .NaN; -0 is less than +0."""

    def manual(inputs):
        a, b = inputs["a"], inputs["b"]
        r = np.where(np.isnan(a), b, np.where(np.isnan(b), a, pick(a, b)))
        zeros = (a == 0) & (b == 0)
        sign = np.signbit(a) & np.signbit(b) if pick is np.maximum else np.signbit(a) | np.signbit(b)
        r = np.where(zeros, np.where(sign, np.float32(-0.0), np.float32(0.0)), r)
        return {"y": np.where((np.isnan(a) | np.isnan(b)) & nan, np.float32(np.nan), r)}

    given = {n: floats(f"{name} {n}", 1024) for n in "ab"}
    given["b"][:512] = generator(name).permutation(np.concatenate([given["b"][:32]] * 16))
    given["a"][:512] = np.concatenate([given["a"][:32]] * 16)
    return lanes(name, f"{name} y, a, b;", given, {"y": np.float32}, manual, Bitwise(nan=True))


def pairs(name: str, arity: int, fn):
    """bf16 or f16, packed (both halves on their own) or one, rounded once. The products are exact in float64; so are the sums
    of the exponents drawn here."""
    kind = "bf16" if "bf16" in name else "f16"

    def value(bits):
        return (
            bits.view(np.float16).astype(np.float64)
            if kind == "f16"
            else (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        )

    def manual(inputs):
        with np.errstate(all="ignore"):
            y = encoded(rounded(fn(*(value(inputs[n].view(np.uint16)) for n in "abc"[:arity])), kind, "rn"), kind)
        return {"y": y.view(word)}

    word, given = np.uint32 if name.endswith("x2") else np.uint16, {}
    for n in "abc"[:arity]:
        x = floats(f"{name} {n}", 2048, -8, 8, special=False)
        given[n] = encoded(rounded(x.astype(np.float64), kind, "rn"), kind).view(word)
    for i, special in enumerate((0x7F807FC0, 0x00018001, 0x3F80FF80, 0x80000000)):
        given["a"][i::97] = special % (1 << 8 * word().itemsize)
    return lanes(name, f"{name} y, {', '.join('abc'[:arity])};", given, {"y": word}, manual)


def signs(name: str, mask: int, flip: bool):
    """neg and abs of f32 and of packed halves touch the sign bits alone."""
    x = generator(name).integers(0, 1 << 32, 512, np.uint64).astype(np.uint32)
    x[:32] = floats(name, 32).view(np.uint32)
    apply = (lambda x: x ^ np.uint32(mask)) if flip else (lambda x: x & ~np.uint32(mask))
    keep = (x & 0x7F80 != 0x7F80) & (x >> 16 & 0x7F80 != 0x7F80)  # NaN may become canonical: infinities and NaNs left out
    x = np.where(keep, x, np.uint32(0x3F80BF80))
    return lanes(name, f"{name} y, x;", {"x": x}, {"y": np.uint32}, lambda i: {"y": apply(i["x"])})


COMPARISONS = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal}


def compare(name: str, unordered: bool):
    """setp.f32: a comparison with NaN is false, and true in the forms that end in u."""

    def manual(inputs):
        a, b = inputs["a"], inputs["b"]
        ordered = ~(np.isnan(a) | np.isnan(b))
        return {"y": np.where(ordered, COMPARISONS[name[:2]](a, b), unordered).astype(np.uint32)}

    given = {n: floats(f"setp {name} {n}", 1024) for n in "ab"}
    given["b"][:512] = generator(name).permutation(np.concatenate([given["b"][:32]] * 16))
    given["a"][:512] = np.concatenate([given["a"][:32]] * 16)
    return lanes(f"setp.{name}.f32", f"setp.{name}.f32 %p1, a, b; selp.b32 y, 1, 0, %p1;", given, {"y": np.uint32}, manual)


PROGRAMS = [
    arithmetic("add.rn.f32", 2, lambda a, b: a + b), arithmetic("sub.rn.f32", 2, lambda a, b: a - b),
    arithmetic("add.f32", 2, lambda a, b: a + b), arithmetic("sub.f32", 2, lambda a, b: a - b),
    arithmetic("mul.rn.f32", 2, lambda a, b: a * b, -80, 60), arithmetic("mul.f32", 2, lambda a, b: a * b, -80, 60),
    arithmetic("fma.rn.f32", 3, lambda a, b, c: a * b + c, -70, 60),
    minmax("max.f32", np.maximum, False), minmax("min.f32", np.minimum, False), minmax("max.NaN.f32", np.maximum, True),
    pairs("mul.rn.bf16x2", 2, lambda a, b: a * b), pairs("fma.rn.bf16x2", 3, lambda a, b, c: a * b + c),
    pairs("mul.rn.f16x2", 2, lambda a, b: a * b), pairs("fma.rn.f16x2", 3, lambda a, b, c: a * b + c),
    pairs("add.rn.f16x2", 2, lambda a, b: a + b), pairs("add.rn.bf16x2", 2, lambda a, b: a + b),
    pairs("mul.bf16", 2, lambda a, b: a * b), pairs("mul.f16", 2, lambda a, b: a * b),
    signs("neg.f32", 0x80000000, True), signs("abs.f32", 0x80000000, False), signs("neg.bf16x2", 0x80008000, True),
    *(compare(c, False) for c in COMPARISONS), compare("ltu", True), compare("neu", True),
]  # fmt: skip
