"""TMA boxes: which global bytes a tiled tensor copy touches and where they lie in shared memory.

PTX ISA, section "Tensor": bounding box, traversal stride, out-of-bounds access, "Swizzling modes"; instructions
cp.async.bulk, cp.async.bulk.tensor (tile mode), cp.reduce.async.bulk*. Nothing is copied here. `box` gives index
arrays, one entry a unit (a power of two of at most 16 bytes that is contiguous on both sides and wholly in or out of
bounds); the engine copies, checks and watches. Loads fill the units out of bounds, stores skip them; either way
`TensorMap.box_bytes` is the byte count. A store knows no bound inside 16 bytes of a row: where the inner size is no multiple of
that, what pads the row to it is written too (in no manual; an H200 does it for elements of 1 to 8 bytes).

Swizzle. Shared memory is permuted in atoms of 16 bytes inside a pattern that repeats every 1024, 512 or 256 bytes. The
pattern belongs to the absolute shared address: bits 4-6 (128B), 4-5 (64B) or 4 (32B) are XORed with bits 7-9, 7-8 or 7.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import numpy as np

from .errors import HwError, HwUnsupported
from .tensormap import SWIZZLE_SPAN, TensorMap

__all__ = [
    "Box",
    "box",
    "swizzle",
    "SWIZZLE_BITS",
    "PATTERN_BYTES",
    "fill_pattern",
    "bulk_copy",
    "check_tensor_variant",
]

SWIZZLE_BITS = {"none": 0, "32B": 1, "64B": 2, "128B": 3}
PATTERN_BYTES = {"none": 16, "32B": 256, "64B": 512, "128B": 1024}
_SHARED_ALIGN = 128
_CONVERTING = ("f32.ftz", "tf32", "tf32.ftz")

_NAN = b"\xf7\x7f"  # the driver names a special NaN without giving its bits: measured on an H200 with f16, bf16 and f32


def swizzle(address, mode: str):
    """Swizzled shared byte address (int or integer array) for mode "none", "32B", "64B", "128B"; its own inverse."""
    mask = (1 << SWIZZLE_BITS[mode]) - 1
    return address ^ ((address >> 7 & mask) << 4)


@dataclass(frozen=True)
class Box:
    """One tiled copy, cut into `unit`-byte pieces in the order of unswizzled shared memory.

    unit       bytes a piece, 1 to 16
    global_    int64 [n] global byte address of each piece (meaningless where not valid)
    shared     int64 [n] absolute shared byte address of each piece, swizzled
    valid      bool [n] whether the piece lies inside the tensor; all_valid is its conjunction
    nbytes     n * unit, what the copy adds to or takes from a tx-count
    fill       what a load writes where not valid: unit bytes
    Arrays may be shared between calls: treat them as read-only.
    """

    unit: int
    global_: np.ndarray
    shared: np.ndarray
    valid: np.ndarray
    all_valid: bool
    nbytes: int
    fill: bytes


def fill_pattern(tmap: TensorMap, nbytes: int) -> bytes:
    """The out-of-bounds fill, nbytes long: zeros, or 0x7ff7 in every 16 bits, a NaN in each floating-point type."""
    return bytes(nbytes) if tmap.fill == "zero" else _NAN * (nbytes // 2)


def box(tmap: TensorMap, coords, shared_address: int, store: bool = False) -> Box:
    """The box of `tmap` at element coordinates `coords` (innermost first, may be negative), at an absolute shared
    address.

    coords: rank integers, as the instruction's tensorCoords (taken as signed 32-bit). A load fills where not valid, a store or
    reduction (store=True) skips. Raises HwError for a wrong number of coordinates,
    for what is an illegal instruction (measured on an H200, in no manual but for the second, CUDA Programming Guide: an
    inner coordinate that is no multiple of 16 bytes; a negative one in a store) and for a shared address that is not a
    multiple of 128; HwUnsupported when a swizzled row is narrower than the swizzle span and for the types that convert
    (f32.ftz, tf32).
    """
    if len(coords) != tmap.rank:
        raise HwError(f"coords: {len(coords)} given, the tensor map has rank {tmap.rank}")
    if shared_address % _SHARED_ALIGN:
        raise HwError(f"shared_address: {shared_address:#x}, accepted multiples of {_SHARED_ALIGN}")
    if tmap.dtype in _CONVERTING:
        raise HwUnsupported(f"tensor map of type {tmap.dtype}: its loads convert the elements, which is not modelled")
    coords = tuple((int(c) + (1 << 31)) % (1 << 32) - (1 << 31) for c in coords)  # .s32, whatever the caller's type
    if coords[0] * tmap.esize % 16:
        raise HwError(f"coords: inner coordinate {coords[0]} x {tmap.esize} bytes, accepted multiples of 16 bytes")
    if store and min(coords) < 0:
        raise HwError(f"coords: {coords} in a store, accepted 0 and up")
    if store and (tail := tmap.dims[0] * tmap.esize % 16):
        tmap = replace(tmap, dims=(tmap.dims[0] + (16 - tail) // tmap.esize, *tmap.dims[1:]))
    unit = _unit(tmap, coords[0])
    relative, extents = _global_offsets(tmap, unit)
    start = tmap.address + sum(c * s for c, s in zip(coords, tmap.byte_strides))
    shared = _shared_addresses(tmap, unit, shared_address)
    valid, all_valid = _in_bounds(tmap, coords, unit, extents)
    return Box(
        unit,
        relative + start,
        shared,
        valid,
        all_valid,
        tmap.box_bytes,
        fill_pattern(tmap, max(unit, tmap.esize))[:unit],
    )


def _unit(tmap: TensorMap, c0: int) -> int:
    """Largest power of two up to 16 such that no piece straddles an edge of dimension 0."""
    edges = tmap.box[0] * tmap.esize
    low, high = -c0, tmap.dims[0] - c0
    for edge in (low, high):
        if 0 < edge < tmap.box[0]:
            edges |= edge * tmap.esize
    return min(16, edges & -edges)


@functools.lru_cache(maxsize=256)
def _global_offsets(tmap: TensorMap, unit: int):
    """Byte offset of every piece from the box's first element, and the per-dimension element offsets of its pieces."""
    inner = np.arange(0, tmap.box[0] * tmap.esize, unit, dtype=np.int64)
    offsets = inner
    extents = [inner // tmap.esize]
    for d in range(1, tmap.rank):
        steps = np.arange(tmap.smem_shape[d], dtype=np.int64) * tmap.estrides[d]
        extents.append(steps)
        offsets = steps.reshape(-1, *(1,) * offsets.ndim) * tmap.byte_strides[d] + offsets
    return np.ascontiguousarray(offsets).reshape(-1), tuple(extents)


@functools.lru_cache(maxsize=1024)
def _shared_addresses(tmap: TensorMap, unit: int, address: int) -> np.ndarray:
    inner = tmap.box[0] * tmap.esize
    span = SWIZZLE_SPAN[tmap.swizzle]
    if tmap.swizzle != "none" and inner != span:
        raise HwUnsupported(
            f"swizzle {tmap.swizzle} with an inner box extent of {inner} bytes: the row pitch is not documented; "
            f"modelled is exactly {span} bytes"
        )
    return swizzle(address + np.arange(0, tmap.box_bytes, unit, dtype=np.int64), tmap.swizzle)


def _in_bounds(tmap: TensorMap, coords, unit: int, extents):
    """Piece by piece: is the element inside [0, dims) in every dimension?"""
    ok = np.ones((), dtype=bool)
    all_valid = True
    for d, steps in enumerate(extents):
        inside = (coords[d] + steps >= 0) & (coords[d] + steps < tmap.dims[d])
        all_valid &= bool(inside.all())
        ok = inside.reshape(-1, *(1,) * ok.ndim) & ok if d else inside
    return ok.reshape(-1), all_valid


def bulk_copy(dst: int, src: int, size: int) -> None:
    """Checks of the non-tensor cp.async.bulk: both addresses and the size are multiples of 16 and the size is positive.

    Such a copy moves `size` consecutive bytes; there is nothing else to model. Raises HwError.
    """
    for name, value in (("dst", dst), ("src", src), ("size", size)):
        if value % 16:
            raise HwError(f"cp.async.bulk: {name} {value:#x}, accepted multiples of 16")
    if size <= 0:
        raise HwError(f"cp.async.bulk: size {size}, accepted positive multiples of 16")


_REFUSED = {
    "im2col": "im2col load modes",
    "im2col_no_offs": "im2col store mode",
    "gather4": "tile::gather4",
    "scatter4": "tile::scatter4",
    "multicast": "multicast to a cluster",
    "cta_group": "the .cta_group::2 form",
    "reduce": "cp.reduce.async.bulk: a reduction needs per-element read-modify-write in global memory",
}


def check_tensor_variant(opcode: str) -> None:
    """Refuse by name the bulk instructions that are not modelled; `opcode` is the whole dotted PTX opcode."""
    parts = opcode.split(".")
    for part in parts:
        key = part.split("::")[-1] if part.startswith(("tile::", "im2col", "multicast")) else part
        if part.startswith("im2col") or part.startswith("multicast"):
            key = part.split("::")[0]
        if part == "cta_group::2":
            key = "cta_group"
        if key in _REFUSED:
            raise HwUnsupported(f"{opcode}: {_REFUSED[key]} not modelled")
