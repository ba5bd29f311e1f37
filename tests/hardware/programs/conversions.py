"""cvt: every rounding mode that the rungs use, and its neighbours (PTX ISA, "Data Movement and Conversion Instructions: cvt").

The expected values are computed from the formats alone: scale to units in the last place, round there, scale back.
"""

from __future__ import annotations

import numpy as np

from .program import Bitwise, floats, generator, lanes

FORMATS = {"bf16": (8, -126, 127), "f16": (11, -14, 15), "tf32": (11, -126, 127)}  # significand bits, exponent range
ROUND = {"rn": np.rint, "rz": np.trunc, "rm": np.floor, "rp": np.ceil, "rna": lambda x: np.copysign(np.floor(np.abs(x) + 0.5), x)}


def rounded(x: np.ndarray, kind: str, mode: str) -> np.ndarray:
    """x (float64) rounded to a number of `kind`, float64; overflow as IEEE 754 has it for the mode."""
    bits, low, high = FORMATS[kind]
    with np.errstate(all="ignore"):
        e = np.maximum(np.frexp(x)[1] - 1, low) - (bits - 1)
        y = np.ldexp(ROUND[mode](np.ldexp(x, -e)), e)
        largest = np.ldexp(2.0 - 2.0 ** (1 - bits), high)
        toward_zero = (mode == "rz") | ((mode == "rm") & (x > 0)) | ((mode == "rp") & (x < 0))
        over = np.isfinite(x) & (np.abs(y) > largest)
        return np.where(over, np.copysign(np.where(toward_zero, largest, np.inf), x), y)


def encoded(y: np.ndarray, kind: str) -> np.ndarray:
    """Bits of numbers of `kind` (exact in float64): uint16, uint32 for tf32. NaN is 0x7fff, the canonical one of cvt (of tf32
    any, see narrow)."""
    if kind == "f16":
        return np.where(np.isnan(y), np.uint16(0x7FFF), y.astype(np.float16).view(np.uint16))
    bits = y.astype(np.float32).view(np.uint32)
    if kind == "tf32":
        return bits
    return np.where(np.isnan(y), np.uint16(0x7FFF), (bits >> 16).astype(np.uint16))


def narrow(kind: str, mode: str, relu: bool = False):
    def manual(inputs):
        x = inputs["x"].astype(np.float64)
        x = np.where(x <= 0, 0.0, x) if relu else x  # -0 too, as measured: the manual says negative numbers
        y = encoded(rounded(x, kind, mode), kind)
        if kind == "tf32":  # a NaN is cut like a number, maybe to an infinity, as measured: no word in the manual
            y = np.where(np.isnan(x), inputs["x"].view(np.uint32) >> 13 << 13, y).view(np.float32)
        return {"y": y}

    name = f"cvt.{mode}{'.relu' if relu else ''}.{kind}.f32"
    x = floats(name, 2048, -30 if kind == "f16" else -140, 18 if kind == "f16" else 128)
    rng = generator(name + " ties")  # half of the rest lie on a tie or just beside it
    u = x[1024:].view(np.uint32)
    drop = 24 - FORMATS[kind][0]
    u[:] = (u >> drop << drop) | np.uint32(1 << (drop - 1)) + rng.integers(-1, 2, len(u)).astype(np.uint32)
    return lanes(name, f"{name} y, x;", {"x": x}, {"y": np.float32 if kind == "tf32" else np.uint16}, manual,
                 Bitwise(nan=True))  # fmt: skip


def packed(kind: str, mode: str, relu: bool = False):
    """The first source goes to the upper half."""

    def manual(inputs):
        high, low = (encoded(rounded(np.where(relu & (v <= 0), 0.0, v), kind, mode), kind).astype(np.uint32)
                     for v in (inputs[n].astype(np.float64) for n in ("a", "b")))  # fmt: skip
        return {"y": high << 16 | low}

    name = f"cvt.{mode}{'.relu' if relu else ''}.{kind}x2.f32"
    span = (-30, 18) if kind == "f16" else (-140, 128)
    given = {n: floats(name + n, 2048, *span) for n in "ab"}
    given["b"] = given["b"][::-1].copy()
    return lanes(name, f"{name} y, a, b;", given, {"y": np.uint32}, manual)


def widen(kind: str):
    """Exact; every 16-bit pattern. NaN payloads pass or become canonical: any NaN will do."""

    def manual(inputs):
        x = inputs["x"]
        y = x.view(np.float16).astype(np.float32) if kind == "f16" else (x.astype(np.uint32) << 16).view(np.float32)
        return {"y": y}

    x = np.arange(1 << 16, dtype=np.uint16)
    name = f"cvt.f32.{kind}"
    return lanes(name, f"{name} y, x;", {"x": x}, {"y": np.float32}, manual, Bitwise(nan=True))


def integral(mode: str, ftz: str = ""):
    function = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}[mode]
    name = f"cvt.{mode}{ftz}.f32.f32"
    return lanes(name, f"{name} y, x;", {"x": floats(name, 1024, -3, 26)}, {"y": np.float32},
                 lambda i: {"y": function(i["x"])}, Bitwise(nan=True))  # fmt: skip


def to_integer(mode: str, kind: str):
    """Out of range saturates; NaN gives 0."""
    info = np.iinfo(np.int32 if kind == "s32" else np.uint32)
    function = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}[mode]

    def manual(inputs):
        x = np.nan_to_num(function(inputs["x"].astype(np.float64)), nan=0.0, posinf=2.0**40, neginf=-(2.0**40))
        return {"y": np.clip(x, info.min, info.max).astype(np.int64).astype(info.dtype)}

    name = f"cvt.{mode}.{kind}.f32"
    return lanes(name, f"{name} y, x;", {"x": floats(name, 1024, -3, 34)}, {"y": info.dtype}, manual)


def from_integer(mode: str, kind: str):
    dtype = {"s32": np.int32, "u32": np.uint32}[kind]

    def manual(inputs):
        x = inputs["x"].astype(np.float64)
        e = np.maximum(np.frexp(x)[1] - 24, 0)
        return {"y": np.ldexp(ROUND[mode](np.ldexp(x, -e)), e).astype(np.float32)}

    name = f"cvt.{mode}.f32.{kind}"
    x = generator(name).integers(0, 1 << 32, 1024, np.uint64).astype(np.uint32) >> generator(name + "s").integers(
        0, 31, 1024
    ).astype(np.uint32)
    x[:4] = 0, 1, 0x7FFFFFFF, 0x80000000
    return lanes(name, f"{name} y, x;", {"x": x.view(dtype)}, {"y": np.float32}, manual)


def between_integers(dst: str, src: str):
    """Sign- or zero-extension by the source's type, truncation to the destination's. Registers of 8-bit types are 16 wide."""
    wide = {n: np.dtype(f"{'i' if n[0] == 's' else 'u'}{max(int(n[1:]) // 8, 2)}") for n in (dst, src)}
    own = {n: np.dtype(f"{'i' if n[0] == 's' else 'u'}{int(n[1:]) // 8}") for n in (dst, src)}

    def manual(inputs):
        x = inputs["x"].astype(own[src]).astype(np.int64) if src[0] == "s" else inputs["x"].astype(own[src]).astype(np.uint64)
        return {"y": x.astype(own[dst]).astype(wide[dst])}

    name = f"cvt.{dst}.{src}"
    x = generator(name).integers(0, 1 << 63, 512, np.uint64).astype(f"u{wide[src].itemsize}").view(wide[src])
    return lanes(name, f"{name} y, x;", {"x": x}, {"y": wide[dst]}, manual)


PROGRAMS = [
    *(narrow(kind, mode) for kind in ("bf16", "f16") for mode in ("rn", "rz")),
    narrow("bf16", "rn", relu=True), narrow("tf32", "rna"),
    *(packed(kind, mode) for kind in ("bf16", "f16") for mode in ("rn", "rz")), packed("bf16", "rn", relu=True),
    widen("bf16"), widen("f16"),
    *(integral(mode) for mode in ("rni", "rzi", "rmi", "rpi")),
    *(to_integer(mode, kind) for mode, kind in (("rni", "s32"), ("rzi", "s32"), ("rmi", "s32"), ("rpi", "s32"), ("rzi", "u32"))),
    *(from_integer(mode, kind) for mode, kind in (("rn", "s32"), ("rz", "s32"), ("rn", "u32"))),
    *(between_integers(*pair) for pair in (("s16", "s8"), ("s32", "s8"), ("s32", "s16"), ("s64", "s32"), ("s8", "s32"),
                                           ("s8", "s64"),
    ("u16", "u32"),
                                           ("u16", "u64"), ("u32", "u64"), ("u64", "u32"), ("u32", "u16"))),
]  # fmt: skip
