"""Dot products as the tensor cores compute them, and bounds on how far they lie from the exact sum.

The PTX ISA leaves the accumulation order, precision and rounding of mma, wgmma and tcgen05.mma unspecified. The default
model here, "fused", is the one that MMA-Sim (arXiv 2511.10909) reports bit-exact on H100 and B200; see also arXiv
2512.07004. An H200 gave its bits in every mma.sync and wgmma tried (tests/hardware). For one instruction:

  1. products a_k b_k are exact, and are not normalised: the exponent of a product is e(a_k) + e(b_k);
  2. all K products and c are aligned to the largest exponent E among them and cut towards zero at bit 2^(E - 25);
     subnormals count with the smallest normal exponent of their format, a product of zero does not count, c of zero
     counts as 2^-126;
  3. the cut terms are added exactly;
  4. the sum is cut towards zero to fp32 (subnormals kept); with an fp16 result it is rounded to nearest even instead.

K is the whole K of the instruction: 16 for bf16 and fp16, 8 for tf32 (8 for m16n8k8 in 16-bit types, 4 for m16n8k4
tf32). Any NaN gives 0x7FFFFFFF (0x7FFF in fp16); infinities follow IEEE. Ampere and Ada differ (24 bits, K split in
two) and are not modelled. The model "exact" adds without any intermediate cut and rounds once to nearest: a reference,
not a machine.
"""

from __future__ import annotations

import numpy as np

from .errors import HwError

__all__ = [
    "dot_accumulate",
    "dot_error_bound",
    "chain_error_bound",
    "widen",
    "unpack_halves",
    "to_bf16_bits",
    "KINDS",
    "FRACTION_BITS",
    "MODELS",
]

FRACTION_BITS = 25  # Hopper wgmma and mma.sync, Blackwell tcgen05: bits kept below the leading exponent
MODELS = ("fused", "exact")
KINDS = {"bf16": -126, "f16": -14, "tf32": -126}  # operand kind -> smallest normal exponent
_NEVER = -(1 << 20)  # exponent of a zero operand: its product never leads


def widen(bits: np.ndarray, kind: str) -> np.ndarray:
    """float32 values of raw operand bits: uint16 for "bf16" and "f16", uint32 for "tf32" and "f32".

    tf32 reads an fp32 register and ignores its 13 low mantissa bits (PTX ISA, "Alternate floating-point data formats").
    """
    if kind == "bf16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    if kind == "f16":
        return np.ascontiguousarray(bits).view(np.float16).astype(np.float32)
    if kind == "tf32":
        return (np.ascontiguousarray(bits).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)
    if kind == "f32":
        return np.ascontiguousarray(bits).view(np.float32)
    raise HwError(f"kind: {kind!r}, accepted bf16, f16, tf32, f32")


def unpack_halves(registers: np.ndarray) -> np.ndarray:
    """16-bit halves of 32-bit registers, uint16 [..., 2 R, lanes] of uint32 [..., R, lanes], low half first."""
    registers = np.asarray(registers, dtype=np.uint32)
    halves = np.empty((*registers.shape[:-2], 2 * registers.shape[-2], registers.shape[-1]), np.uint16)
    halves[..., 0::2, :], halves[..., 1::2, :] = registers & 0xFFFF, registers >> 16
    return halves


def to_bf16_bits(x: np.ndarray) -> np.ndarray:
    """uint16 bits of fp32 values rounded to nearest even bf16 (NaN becomes 0x7FFF), as cvt.rn.bf16.f32."""
    u = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    r = ((u.astype(np.uint64) + 0x7FFF + (u >> 16 & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FFF), r)


def _exponents(x: np.ndarray, smallest: int, zero: int) -> np.ndarray:
    """Exponent of each value as the alignment sees it: subnormals count with the smallest normal exponent."""
    e = np.frexp(x)[1].astype(np.int32) - 1
    np.maximum(e, smallest, out=e)
    e[x == 0] = zero
    return e


def dot_accumulate(a, b, c, kind: str = "bf16", model: str = "fused", out: str = "f32") -> np.ndarray:
    """d = a @ b + c for one tensor-core instruction.

    a [..., M, K], b [..., K, N]: float32 values exactly representable in `kind` ("bf16", "f16" or "tf32"; for tf32 the
    13 low mantissa bits are cut here). c [..., M, N] float32 (float16 values for out "f16") or None for zero. K must be
    the whole K of the instruction, or for several instructions in sequence call once each. Returns float32 [..., M, N]
    (float16 for out "f16"). Raises HwError for an unknown kind, model or out.
    """
    if kind not in KINDS or model not in MODELS or out not in ("f32", "f16"):
        raise HwError(f"kind {kind!r}, model {model!r}, out {out!r}: accepted {tuple(KINDS)}, {MODELS}, ('f32', 'f16')")
    a, b = np.asarray(a, dtype=np.float32), np.asarray(b, dtype=np.float32)
    if kind == "tf32":
        a, b = widen(a, "tf32"), widen(b, "tf32")
    shape = (*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])
    c = np.zeros(shape, np.float32) if c is None else np.asarray(c, dtype=np.float32)
    finite = np.isfinite(a).all() and np.isfinite(b).all() and np.isfinite(c).all()
    with np.errstate(invalid="ignore", over="ignore"):
        plain = None if finite else a.astype(np.float64) @ b.astype(np.float64) + c
        if not finite:
            a, b, c = (np.where(np.isfinite(x), x, np.float32(0)) for x in (a, b, c))
        total = _fused(a, b, c, kind, out) if model == "fused" else _exact(a, b, c)
        result = _round(total, out, truncate=model == "fused")
    if plain is not None:
        special = ~np.isfinite(plain)
        result[special] = plain[special].astype(result.dtype)
        result[np.isnan(plain)] = _nan(out)
    return result


def _nan(out):
    bits = np.array(0x7FFFFFFF, np.uint32) if out == "f32" else np.array(0x7FFF, np.uint16)
    return bits.view(np.float32 if out == "f32" else np.float16)


def _alignment(a, b, c, kind, out="f32"):
    """Exponent E of the leading term per output element, int32 [..., M, N]."""
    ea, eb = _exponents(a, KINDS[kind], _NEVER), _exponents(b, KINDS[kind], _NEVER)
    top = _exponents(c, -14 if out == "f16" else -126, -126)
    for k in range(a.shape[-1]):
        np.maximum(top, ea[..., :, k, None] + eb[..., None, k, :], out=top)
    return top


def _fused(a, b, c, kind, out):
    """Steps 1 to 3 of the model, in float64 (exact: every term is a multiple of 2^(E-25) below 2^(E+2))."""
    top = _alignment(a, b, c, kind, out)
    up = np.ldexp(1.0, FRACTION_BITS - top)
    a64, b64 = a.astype(np.float64), b.astype(np.float64)
    total = np.trunc(c * up)
    term = np.empty(total.shape, np.float64)
    for k in range(a.shape[-1]):
        np.multiply(a64[..., :, k, None], b64[..., None, k, :], out=term)
        np.multiply(term, up, out=term)
        np.trunc(term, out=term)
        total += term
    return total / up


def _exact(a, b, c):
    """Sum in float64; exact whenever the terms span at most 53 bits, otherwise within K ulps of float64."""
    return a.astype(np.float64) @ b.astype(np.float64) + c


def _round(total, out, truncate):
    if out == "f16":
        return total.astype(np.float16)  # one rounding from float64, to nearest even
    nearest = total.astype(np.float32)
    if not truncate:
        return nearest
    # Cut towards zero: step back where rounding to nearest went away from zero.
    past = np.abs(nearest.astype(np.float64)) > np.abs(total)
    cut = np.where(past, np.nextafter(nearest, np.float32(0)), nearest)
    # A sum at or beyond 2^128 has no fp32 neighbour to be cut to: it is an infinity, as the reference model has it.
    return np.where(np.abs(total) >= 2.0**128, nearest, cut).astype(np.float32)


def dot_error_bound(a, b, c, kind: str = "bf16") -> np.ndarray:
    """Bound on |fused - exact real sum| for one instruction with an fp32 result, float64 [..., M, N].

    Each of the K + 1 terms loses less than 2^(E-25), and the cut to fp32 loses less than 2^-23 of the result or one
    subnormal step 2^-149. The result is at most |exact| + (K + 1) 2^(E-25), so the bound is
    (K + 1) 2^(E-25) (1 + 2^-23) + 2^-23 |exact| + 2^-149. Valid for any unit that keeps at least 25 bits below the
    leading exponent, cutting or rounding, in any order within one instruction. Inputs finite; shapes as dot_accumulate.
    """
    a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
    if kind == "tf32":
        a, b = widen(a, "tf32"), widen(b, "tf32")
    exact = a.astype(np.float64) @ b.astype(np.float64)
    c = np.zeros(exact.shape, np.float32) if c is None else np.asarray(c, np.float32)
    lost = (a.shape[-1] + 1) * np.ldexp(1.0, _alignment(a, b, c, kind) - FRACTION_BITS)
    return lost * (1 + 2.0**-23) + 2.0**-23 * np.abs(exact + c) + 2.0**-149


def chain_error_bound(a, b, c, kind: str = "bf16", k_step: int | None = None) -> np.ndarray:
    """Bound on |hardware - exact| for K accumulated in instructions of k_step (16, or 8 for tf32), float64 [..., M, N].

    With S = sum |a_k| |b_k| + |c| + 2^-126, subnormal magnitudes raised to the smallest normal number that their
    exponent counts as, every exponent satisfies 2^E <= S' where S' bounds the running sums too. One step loses at most
    u S' + 2^-149 with u = (k_step + 1) 2^-25 + 2^-23. Over n steps S' <= S (1 + u)^n; the bound is n u S (1 + u)^n + n
    2^-149. Two machines within the model differ by at most twice this.
    """
    k_step = k_step or (8 if kind == "tf32" else 16)
    a64, b64 = (_counted(x, KINDS[kind]) for x in (a, b))
    total = a64 @ b64 + (0 if c is None else _counted(c, -126)) + 2.0**-126
    n = -(-a64.shape[-1] // k_step)
    u = (k_step + 1) * 2.0**-FRACTION_BITS + 2.0**-23
    return n * u * total * (1 + u) ** n + n * 2.0**-149


def _counted(x, smallest):
    """|x|, raised to the smallest normal number when subnormal: what its exponent counts with. Zero stays zero."""
    x = np.abs(np.asarray(x, np.float64))
    return np.where(x == 0, 0, np.maximum(x, 2.0**smallest))
