"""Shared-memory matrix descriptors of wgmma and tcgen05.mma, and where each operand element lies.

PTX ISA: wgmma, "Shared Memory Matrix Layout", "Major-ness supported by Strides" and "Matrix Descriptor Format";
tcgen05, "Major-ness supported by Strides", "Canonical Layouts" and "Shared memory descriptor". The canonical layouts
agree with the comments in CUTLASS's mma_traits_sm90_gmma.hpp. With T the elements in 16 bytes, W the 16-byte atoms in a
swizzle span (8, 4, 2; 1 without swizzle), the unswizzled byte offset from the start address of element (mn, k) is

    K-major,  no swizzle   16 (mn % 8) + SBO (mn / 8) + LBO (k / T) + element (k % T)
    K-major,  swizzled     16 W (mn % 8) + SBO (mn / 8) + element k                       (LBO not used)
    MN-major, no swizzle   element (mn % T) + SBO (mn / T) + 16 (k % 8) + LBO (k / 8)
    MN-major, swizzled     element (mn % TW) + LBO (mn / TW) + 16 W (k % 8) + SBO (k / 8)

and the address is swizzle(start + offset), with the XOR of `tma.swizzle` on absolute shared addresses.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from .errors import HwError, HwUnsupported
from .tma import swizzle

__all__ = [
    "MatrixDesc",
    "decode_wgmma",
    "encode_wgmma",
    "decode_tcgen05",
    "encode_tcgen05",
    "operand_addresses",
    "operand_units",
    "gather_operand",
]

_WGMMA_SWIZZLE = ("none", "128B", "64B", "32B")  # bits 62-63
_TCGEN05_SWIZZLE = {0: "none", 2: "128B", 4: "64B", 6: "32B"}  # bits 61-63
_TCGEN05_VERSION = 1  # bits 46-48
_SPAN = {"none": 16, "32B": 32, "64B": 64, "128B": 128}


@dataclass(frozen=True)
class MatrixDesc:
    """A decoded descriptor. start, lbo and sbo are bytes (multiples of 16, below 2^18); swizzle as in tma.swizzle."""

    start: int
    lbo: int
    sbo: int
    swizzle: str


def _fields(word: int, name: str):
    start, lbo, sbo = ((word >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
    if word >> 49 & 7:
        raise HwUnsupported(
            f"{name} descriptor {word:#018x}: base offset {word >> 49 & 7} is not modelled; place the operand so "
            "that its swizzle pattern starts on a pattern boundary (1024, 512 or 256 bytes)"
        )
    return start, lbo, sbo


def decode_wgmma(word: int) -> MatrixDesc:
    """Decode a wgmma descriptor (64-bit). Raises HwUnsupported for a base offset other than 0."""
    word = int(word)
    start, lbo, sbo = _fields(word, "wgmma")
    return MatrixDesc(start, lbo, sbo, _WGMMA_SWIZZLE[word >> 62 & 3])


def decode_tcgen05(word: int) -> MatrixDesc:
    """Decode a tcgen05 shared-memory descriptor (64-bit).

    Raises HwError when bits 46-48 are not 0b001 or bits 53-60 not zero, or the swizzle code is 3, 5 or 7; HwUnsupported
    for a base offset, for leading-dimension address mode (bit 52) and for 128B swizzle with 32-byte atoms.
    """
    word = int(word)
    start, lbo, sbo = _fields(word, "tcgen05")
    if word >> 46 & 7 != _TCGEN05_VERSION:
        raise HwError(f"tcgen05 descriptor {word:#018x}: bits 46-48 are {word >> 46 & 7:#05b}, accepted 0b001")
    if word >> 53 & 0xFF:
        raise HwError(f"tcgen05 descriptor {word:#018x}: bits 53-60 are {word >> 53 & 0xFF:#x}, accepted 0")
    if word >> 52 & 1:
        raise HwUnsupported(f"tcgen05 descriptor {word:#018x}: leading-dimension absolute address mode is not modelled")
    code = word >> 61 & 7
    if code == 1:
        raise HwUnsupported(f"tcgen05 descriptor {word:#018x}: 128B swizzle with 32-byte atoms is not modelled")
    if code not in _TCGEN05_SWIZZLE:
        raise HwError(f"tcgen05 descriptor {word:#018x}: swizzle code {code}, accepted 0, 1, 2, 4, 6")
    return MatrixDesc(start, lbo, sbo, _TCGEN05_SWIZZLE[code])


def _pack(desc: MatrixDesc) -> int:
    for name in ("start", "lbo", "sbo"):
        value = getattr(desc, name)
        if value % 16 or not 0 <= value < 1 << 18:
            raise HwError(f"{name}: {value} bytes, accepted multiples of 16 below 2^18")
    return desc.start >> 4 | desc.lbo >> 4 << 16 | desc.sbo >> 4 << 32


def encode_wgmma(desc: MatrixDesc) -> int:
    """Inverse of decode_wgmma."""
    return _pack(desc) | _WGMMA_SWIZZLE.index(desc.swizzle) << 62


def encode_tcgen05(desc: MatrixDesc) -> int:
    """Inverse of decode_tcgen05."""
    code = {name: code for code, name in _TCGEN05_SWIZZLE.items()}[desc.swizzle]
    return _pack(desc) | _TCGEN05_VERSION << 46 | code << 61


@functools.lru_cache(maxsize=256)
def _offsets(lbo, sbo, mode, mn, k, esize, major) -> np.ndarray:
    """Unswizzled byte offsets [mn, k] from the start address (formulas in the module docstring)."""
    t, span = 16 // esize, _SPAN[mode]
    i = np.arange(mn, dtype=np.int64)[:, None]
    j = np.arange(k, dtype=np.int64)[None, :]
    if major == "K":
        if mode == "none":
            return 16 * (i % 8) + sbo * (i // 8) + lbo * (j // t) + esize * (j % t)
        if k * esize > span:
            raise HwUnsupported(f"K-major operand with K of {k * esize} bytes beyond its {span}-byte swizzle span")
        return span * (i % 8) + sbo * (i // 8) + esize * j
    if mode == "none":
        return esize * (i % t) + sbo * (i // t) + 16 * (j % 8) + lbo * (j // 8)
    run = span // esize
    return esize * (i % run) + lbo * (i // run) + span * (j % 8) + sbo * (j // 8)


def operand_addresses(desc: MatrixDesc, mn: int, k: int, esize: int, major: str) -> np.ndarray:
    """Shared byte address of each element, int64 [mn, k].

    mn: extent in M (operand A) or N (operand B); k: the instruction's K; esize: 2 or 4 bytes; major: "K" or "MN".
    Raises HwError for other esize or major, HwUnsupported for MN-major 4-byte elements (they need 32-byte swizzle
    atoms).
    """
    if major not in ("K", "MN") or esize not in (2, 4):
        raise HwError(f"major {major!r}, esize {esize}: accepted 'K' or 'MN', 2 or 4")
    if major == "MN" and esize == 4:
        raise HwUnsupported(
            "MN-major operand of 4-byte elements: not in wgmma, and in tcgen05 only with 32-byte swizzle atoms"
        )
    return swizzle(desc.start + _offsets(desc.lbo, desc.sbo, desc.swizzle, mn, k, esize, major), desc.swizzle)


def operand_units(desc: MatrixDesc, mn: int, k: int, esize: int, major: str) -> np.ndarray:
    """Addresses of the 16-byte units the operand occupies, int64 [n], for bounds checks and watches."""
    step = 16 // esize
    addresses = operand_addresses(desc, mn, k, esize, major)
    return (addresses[:, ::step] if major == "K" else addresses[::step]).reshape(-1)


def gather_operand(smem: np.ndarray, desc: MatrixDesc, mn: int, k: int, esize: int, major: str) -> np.ndarray:
    """Raw bits of the operand, uint16 or uint32 [mn, k], from shared memory as a uint8 array indexed by shared
    address."""
    addresses = operand_addresses(desc, mn, k, esize, major)
    if addresses.max() + esize > smem.size:
        raise HwError(
            f"operand at {desc.start:#x}: reaches byte {int(addresses.max()) + esize:#x} of {smem.size:#x} in shared "
            "memory"
        )
    return smem[: smem.size & -4].view(np.uint16 if esize == 2 else np.uint32)[addresses // esize]
