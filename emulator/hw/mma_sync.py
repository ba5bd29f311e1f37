"""mma.sync.aligned m16n8k16, m16n8k8 (bf16, fp16) and m16n8k8, m16n8k4 (tf32): fragments and product.

PTX ISA, "Matrix multiply-accumulate operation using mma instruction", the fragment figures of each shape. A is
row-major, B column-major. Arrays hold one warp in their last two axes, [register, 32 lanes]; leading axes are batched.
With group = lane / 4 and quad = lane % 4.
"""

from __future__ import annotations

import functools

import numpy as np

from .errors import HwUnsupported
from .numerics import dot_accumulate, unpack_halves, widen

__all__ = ["a_layout", "b_layout", "c_layout", "mma"]

_K = {"bf16": (16, 8), "f16": (16, 8), "tf32": (8, 4)}


def _check(kind, k):
    if k not in _K.get(kind, ()):
        raise HwUnsupported(f"mma.sync.m16n8k{k} with {kind} operands is not modelled; modelled are {_K}")


def _lanes():
    lane = np.arange(32)
    return lane // 4, lane % 4


@functools.lru_cache(maxsize=8)
def a_layout(kind: str, k: int) -> tuple[np.ndarray, np.ndarray]:
    """(row, k) of each element of A, int [elements, 32]; 16-bit elements two a register, low half first.

    16-bit element e: row group + 8 (e / 2 % 2), k 2 quad + e % 2 + 8 (e / 4). tf32: row group + 8 (e % 2), k quad + 4
    (e / 2).
    """
    _check(kind, k)
    group, quad = _lanes()
    e = np.arange(k // 2)[:, None]
    if kind == "tf32":
        return group + 8 * (e % 2), quad + 4 * (e // 2)
    return group + 8 * (e // 2 % 2), 2 * quad + e % 2 + 8 * (e // 4)


@functools.lru_cache(maxsize=8)
def b_layout(kind: str, k: int) -> tuple[np.ndarray, np.ndarray]:
    """(k, n) of each element of B, int [elements, 32].

    16-bit element e: k 2 quad + e % 2 + 8 (e / 2), n group. tf32: k quad + 4 e, n group.
    """
    _check(kind, k)
    group, quad = _lanes()
    e = np.arange(k // 4)[:, None]
    rows = quad + 4 * e if kind == "tf32" else 2 * quad + e % 2 + 8 * (e // 2)
    return rows, np.broadcast_to(group, rows.shape)


@functools.lru_cache(maxsize=1)
def c_layout() -> tuple[np.ndarray, np.ndarray]:
    """(row, column) of each of the four accumulator registers, int [4, 32]: row group + 8 (i / 2), column 2 quad + i %
    2."""
    group, quad = _lanes()
    i = np.arange(4)[:, None]
    return group + 8 * (i // 2), 2 * quad + i % 2


def _matrix(bits, layout, shape):
    matrix = np.empty((*bits.shape[:-2], *shape), bits.dtype)
    matrix[..., layout[0], layout[1]] = bits
    return matrix


def mma(a: np.ndarray, b: np.ndarray, c: np.ndarray, kind: str, k: int, model: str = "fused") -> np.ndarray:
    """D registers, float32 [..., 4, 32].

    a: uint32 [..., RA, 32], b: uint32 [..., RB, 32] (RA = K / 4 in 16-bit kinds and K / 2 in tf32, RB half of that), c:
    float32 [..., 4, 32]. Raises HwUnsupported for shapes and kinds not listed above. Numerics: numerics.dot_accumulate.
    """
    if kind != "tf32":
        a, b = unpack_halves(a), unpack_halves(b)
    av = widen(_matrix(a, a_layout(kind, k), (16, k)), kind)
    bv = widen(_matrix(b, b_layout(kind, k), (k, 8)), kind)
    d = dot_accumulate(av, bv, _matrix(c, c_layout(), (16, 8)), kind, model)
    row, col = c_layout()
    return d[..., row, col]
