"""wgmma.mma_async: register fragments and the product (sm_90a).

PTX ISA, "Asynchronous Warpgroup Level Matrix Multiply-Accumulate": "Register Fragments" (m64nNk16, m64nNk8 figures) and
wgmma.mma_async. Thread t of the warpgroup is 32 * warp + lane. Index arrays have shape [register, 128]; the engine's
four register files of [register, 32] are slices of them. Operands in shared memory come through matrix_desc: A is M x
K, K-major unless imm-trans-a, B is N x K, K-major unless imm-trans-b.
"""

from __future__ import annotations

import functools

import numpy as np

from .errors import HwError, HwUnsupported
from .numerics import dot_accumulate, unpack_halves, widen

__all__ = ["M", "K", "check", "d_layout", "a_layout", "d_to_matrix", "matrix_to_d", "a_to_matrix", "mma"]

M = 64
K = {"bf16": 16, "f16": 16, "tf32": 8}


def check(n: int, kind: str, out: str = "f32", trans_a: int = 0, trans_b: int = 0) -> None:
    """Raise HwError for a shape or combination the manual does not have, HwUnsupported for other operand kinds.

    n: multiple of 8, 8 to 256. kind: bf16, f16, tf32 (transposes only in the 16-bit kinds). out: f32, or f16 with kind
    f16.
    """
    if kind not in K:
        raise HwUnsupported(f"wgmma with {kind} operands is not modelled, only {tuple(K)}")
    if n % 8 or not 8 <= n <= 256:
        raise HwError(f"wgmma: N = {n}, accepted multiples of 8 from 8 to 256")
    if (trans_a or trans_b) and kind == "tf32":
        raise HwError("wgmma: tf32 operands cannot be transposed")
    if out not in ("f32", "f16") or (out == "f16" and kind != "f16"):
        raise HwError(f"wgmma: D of type {out} with {kind} operands; accepted f32, or f16 with f16")


def _thread():
    t = np.arange(128)
    return t // 32, t % 32 // 4, t % 4  # warp, group, thread in group


@functools.lru_cache(maxsize=64)
def d_layout(n: int) -> tuple[np.ndarray, np.ndarray]:
    """(row, column) of each 32-bit accumulator element, int [N/2, 128] (figure of the m64nNk16 fragment for D).

    Element i of a thread: row 16 warp + group + 8 (i / 2 % 2), column 8 (i / 4) + 2 (thread % 4) + i % 2.
    With an fp16 D, register r holds elements 2r (low half) and 2r + 1.
    """
    warp, group, quad = _thread()
    i = np.arange(n // 2)[:, None]
    return 16 * warp + group + 8 * (i // 2 % 2), 8 * (i // 4) + 2 * quad + i % 2


@functools.lru_cache(maxsize=4)
def a_layout(kind: str) -> tuple[np.ndarray, np.ndarray]:
    """(row, k) of each element of A in registers, int [elements, 128].

    16-bit kinds, 8 elements in 4 registers, element e in half e % 2 of register e / 2:
        row 16 warp + group + 8 (e / 2 % 2), k 2 (thread % 4) + e % 2 + 8 (e / 4)
    tf32, 4 elements, one a register:
        row 16 warp + group + 8 (e % 2), k thread % 4 + 4 (e / 2)
    """
    warp, group, quad = _thread()
    if kind == "tf32":
        e = np.arange(4)[:, None]
        return 16 * warp + group + 8 * (e % 2), quad + 4 * (e // 2)
    e = np.arange(8)[:, None]
    return 16 * warp + group + 8 * (e // 2 % 2), 2 * quad + e % 2 + 8 * (e // 4)


def d_to_matrix(registers: np.ndarray, n: int, out: str = "f32") -> np.ndarray:
    """D registers, uint32 [..., N/2, 128] ([..., N/4, 128] for fp16) to values [..., 64, N], float32 (float16)."""
    row, col = d_layout(n)
    values = (
        unpack_halves(registers).view(np.float16) if out == "f16" else np.ascontiguousarray(registers).view(np.float32)
    )
    matrix = np.empty((*values.shape[:-2], M, n), values.dtype)
    matrix[..., row, col] = values
    return matrix


def matrix_to_d(matrix: np.ndarray, out: str = "f32") -> np.ndarray:
    """Inverse of d_to_matrix: uint32 registers [..., N/2, 128] ([..., N/4, 128] for fp16)."""
    row, col = d_layout(matrix.shape[-1])
    values = np.ascontiguousarray(matrix[..., row, col])
    if out == "f16":
        halves = values.view(np.uint16).astype(np.uint32)
        return halves[..., 0::2, :] | halves[..., 1::2, :] << 16
    return values.view(np.uint32)


def a_to_matrix(registers: np.ndarray, kind: str) -> np.ndarray:
    """A registers, uint32 [..., 4, 128], to raw bits [..., 64, K], uint16 (uint32 for tf32)."""
    row, col = a_layout(kind)
    bits = np.asarray(registers, dtype=np.uint32) if kind == "tf32" else unpack_halves(registers)
    matrix = np.empty((*bits.shape[:-2], M, K[kind]), bits.dtype)
    matrix[..., row, col] = bits
    return matrix


def mma(
    a_bits,
    b_bits,
    d,
    kind: str,
    *,
    scale_d: bool = True,
    scale_a: int = 1,
    scale_b: int = 1,
    out: str = "f32",
    model: str = "fused",
) -> np.ndarray:
    """One wgmma: [64, N] values of D after the instruction. Leading axes (CTAs) are batched.

    a_bits: raw bits [64, K] (a_to_matrix or matrix_desc.gather_operand); b_bits: raw bits [N, K]; d: values [64, N]
    before it (ignored when scale_d is false); scale_a, scale_b: 1 or -1 (imm-scale). Numerics: numerics.dot_accumulate.
    """
    if scale_a not in (1, -1) or scale_b not in (1, -1):
        raise HwError(f"wgmma: imm-scale-a {scale_a}, imm-scale-b {scale_b}, accepted 1 or -1")
    check(b_bits.shape[-2], kind, out)
    a, b = widen(a_bits, kind), widen(b_bits, kind)
    if scale_a != scale_b:  # negating both, or either, changes the product alone
        a = -a
    return dot_accumulate(a, b.swapaxes(-1, -2), d if scale_d else None, kind, model, out)
