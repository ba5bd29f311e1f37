"""Floating-point formats and roundings as numpy functions (PTX ISA, cvt and "Rounding Modifiers": rn rz rm rp rna)."""

from __future__ import annotations

from fractions import Fraction
from math import inf, isfinite

import numpy as np

F32, F64, U16, U32, U64 = np.float32, np.float64, np.uint16, np.uint32, np.uint64
BF16_NAN, F16_NAN, F32_NAN = U16(0x7FFF), U16(0x7FFF), U32(0x7FFFFFFF)


def bf16_to_f32(bits):
    return (bits.astype(U32) << U32(16)).view(F32)


def f16_to_f32(bits):
    return bits.view(np.float16).astype(F32)


def f32_to_bf16(x, mode="rn"):
    """f32 array to bf16 bits (uint16). NaN becomes the canonical 0x7fff."""
    x = np.ascontiguousarray(x, F32)
    u = x.view(U32)
    if mode == "rn":
        r = ((u + (U32(0x7FFF) + ((u >> U32(16)) & U32(1)))) >> U32(16)).astype(U16)
    elif mode == "rna":
        r = ((u + U32(0x8000)) >> U32(16)).astype(U16)
    elif mode == "rz":
        r = (u >> U32(16)).astype(U16)
    else:
        away = (u & U32(0xFFFF) != 0) & ((u >> U32(31) == 1) == (mode == "rm"))
        r = ((u >> U32(16)) + away.astype(U32)).astype(U16)
    nan = np.isnan(x)
    return np.where(nan, BF16_NAN, r) if nan.any() else r


def _directed(x, r, mode):
    """Move the round-to-nearest result r (narrow type) of x (float64) to what `mode` asks for."""
    back = r.astype(F64)
    inf = r.dtype.type(np.inf)
    zero = r.dtype.type(0)
    if mode == "rz":
        return np.where(np.abs(back) > np.abs(x), np.nextafter(r, zero), r)
    if mode == "rm":
        return np.where(back > x, np.nextafter(r, -inf), r)
    if mode == "rp":
        return np.where(back < x, np.nextafter(r, inf), r)
    return r


def to_f32(x, mode="rn"):
    """float64 array to float32."""
    x = np.asarray(x, F64)
    r = x.astype(F32)
    return r if mode == "rn" else _directed(x, r, mode)


def to_f16(x, mode="rn"):
    """float32 or float64 array to float16 bits (uint16)."""
    r = x.astype(np.float16)
    if mode != "rn":
        r = _directed(x.astype(F64), r, mode)
    bits = r.view(U16)
    nan = np.isnan(r)
    return np.where(nan, F16_NAN, bits) if nan.any() else bits


def to_tf32(x, mode="rna"):
    """f32 array to tf32 in a 32-bit container, low 13 bits zero but in NaN (cvt.{rna,rn,rz}.tf32.f32)."""
    u = np.ascontiguousarray(x, F32).view(U32)
    if mode == "rna":
        r = u + U32(0x1000)
    elif mode == "rn":
        r = u + (U32(0xFFF) + ((u >> U32(13)) & U32(1)))
    else:
        r = u
    special = (u & U32(0x7F800000)) == U32(0x7F800000)
    return np.where(np.isnan(x), F32_NAN, np.where(special, u, r) & U32(0xFFFFE000))


def flush(x):
    """.ftz: subnormal float32 to zero of the same sign."""
    small = np.abs(x) < F32(2.0**-126)
    return np.where(small, np.copysign(F32(0), x), x) if small.any() else x


def odd_sum(p, c):
    """p + c (float64) rounded to odd, so that one more rounding to a narrower type is correct."""
    s = p + c
    bb = s - p
    err = (p - (s - bb)) + (c - bb)
    fix = (err != 0) & np.isfinite(s)
    if not fix.any():
        return s
    bits = s.view(np.int64) if s.flags.c_contiguous else np.ascontiguousarray(s).view(np.int64)
    even = fix & (bits & 1 == 0)
    toward = np.where(err > 0, np.inf, -np.inf)
    return np.where(even, np.nextafter(s, toward), s)


def fma_f32(a, b, c, mode="rn"):
    """Fused multiply-add of float32 arrays, correctly rounded: the product is exact in float64."""
    s = odd_sum(a.astype(F64) * b.astype(F64), c.astype(F64))
    return to_f32(s, mode)


def fma_f64(a, b, c):
    """a b + c, rounded once to nearest; value by value, as nothing wider holds the sum."""
    return np.frompyfunc(_fma, 3, 1)(a, b, c).astype(np.float64)


def _fma(a: float, b: float, c: float) -> float:
    if not (isfinite(a) and isfinite(b)):
        return a * b + c
    if not isfinite(c):
        return c  # the product may not be finite in float64, but it is
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if exact == 0:
        return 0.0 if a and b else a * b + c  # the signs of zeros
    try:
        return float(exact)
    except OverflowError:
        return inf if exact > 0 else -inf


def odd_f32(x):
    """float64 to float32 rounded to odd."""
    r = _directed(x, x.astype(F32), "rz")
    inexact = (r.astype(F64) != x) & np.isfinite(x)
    return (np.ascontiguousarray(r).view(U32) | inexact.astype(U32)).view(F32)


def f64_to_bf16(x, mode="rn"):
    return f32_to_bf16(odd_f32(np.asarray(x, F64)), mode)
