"""The 128-byte tensor map (CUtensorMap) in tiled mode: decode, check, encode.

Field meanings: PTX ISA, "Tensor" (section 5.5: dimension, sizes, strides, bounding box, traversal stride, interleave,
swizzling modes, out-of-bounds fill) and the driver API entry cuTensorMapEncodeTiled for the legal ranges. The bit
positions are undocumented; they were read off maps written by the CuTe DSL's host code, which writes the same 64 bytes
for sm_90a and sm_100a. cuTensorMapEncodeTiled of driver 580 writes the same fields (tests/hardware); bit 1 of word 1 is
clear there, and bits 17 and 18, which CuTe sets to 2, are 0 where no L2 promotion is asked for. Bytes 64-127 carry
nothing. Nothing is validated by whoever writes a map, so `decode` reports what is illegal.
"""

from __future__ import annotations

import functools
import struct
from dataclasses import dataclass

from .errors import HwError, HwUnsupported

__all__ = ["TensorMap", "decode", "encode", "ELEMENT_TYPES", "SWIZZLES", "SWIZZLE_SPAN"]

ELEMENT_TYPES = {
    0: ("u8", 1),
    1: ("u16", 2),
    2: ("u32", 4),
    3: ("s32", 4),
    4: ("u64", 8),
    5: ("s64", 8),
    6: ("f16", 2),
    7: ("f32", 4),
    8: ("f32.ftz", 4),
    9: ("f64", 8),
    10: ("bf16", 2),
}
_TF32 = {7: "tf32", 8: "tf32.ftz"}
_CODES = {name: code for code, (name, _) in ELEMENT_TYPES.items()}
_CODES_TF32 = {name: code for code, name in _TF32.items()}
SWIZZLES = ("none", "32B", "64B", "128B")
SWIZZLE_SPAN = {"none": 16, "32B": 32, "64B": 64, "128B": 128}  # bytes of one swizzled row
_ATOMS = ("16B", "32B", "32B+flip", "64B")
_INTERLEAVES = ("none", "16B", "32B", "reserved")
_MAX_BOX = 256


@dataclass(frozen=True)
class TensorMap:
    """One decoded tiled tensor map. All tuples are innermost dimension first, as the hardware counts them.

    address  global byte address of element (0, ..., 0), a multiple of 16
    dtype    element type by name (ELEMENT_TYPES, or "tf32"); esize is its size in bytes
    dims     extent of each dimension, in elements
    strides  byte strides of dimensions 1 .. rank-1, multiples of 16 (dimension 0 is contiguous)
    box      extent of the bounding box in each dimension, in elements of the global tensor
    estrides traversal stride of each dimension, in elements (dimension 0's is ignored by the hardware: see tma)
    swizzle  "none", "32B", "64B" or "128B"; always with 16-byte atoms
    fill     "zero" or "nan": what a load writes for elements out of bounds
    """

    address: int
    dtype: str
    esize: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    estrides: tuple[int, ...]
    swizzle: str = "none"
    fill: str = "zero"

    @property
    def rank(self) -> int:
        return len(self.dims)

    @functools.cached_property
    def byte_strides(self) -> tuple[int, ...]:
        """Byte stride of every dimension, dimension 0 included."""
        return (self.esize, *self.strides)

    @functools.cached_property
    def smem_shape(self) -> tuple[int, ...]:
        """Elements of the box that reach shared memory, per dimension: ceil(box / traversal stride); dimension 0
        whole."""
        return (self.box[0], *(-(-b // s) for b, s in zip(self.box[1:], self.estrides[1:])))

    @functools.cached_property
    def box_bytes(self) -> int:
        """Bytes of one box in shared memory, which is also what it adds to a barrier's tx-count (clipped or not)."""
        n = self.esize
        for extent in self.smem_shape:
            n *= extent
        return n


def _u(words, word, offset, width):
    return (words[word] >> offset) & ((1 << width) - 1)


def decode(raw: bytes, check: bool = True) -> TensorMap:
    """Decode a tensor map from its first 64 bytes (128 may be given).

    Raises HwUnsupported for im2col maps, interleaved layouts, swizzle atoms other than 16 bytes and sub-byte types;
    HwError for fields outside the legal ranges (unless check is False).
    """
    if len(raw) < 64:
        raise HwError(f"raw: {len(raw)} bytes given, a tensor map has 128 (64 of them used)")
    w = struct.unpack("<8Q", bytes(raw[:64]))
    if _u(w, 1, 0, 1):
        raise HwUnsupported("tensor map: im2col mode is not modelled, only tiled")
    code, rank = _u(w, 1, 7, 4), _u(w, 1, 4, 3) + 1
    if code not in ELEMENT_TYPES:
        raise HwUnsupported(f"tensor map: element type code {code} (sub-byte) is not modelled")
    dtype, esize = ELEMENT_TYPES[code]
    if _u(w, 1, 16, 1):
        dtype = _TF32.get(code) or _fail(
            f"tensor map: the tf32 bit is set with element type {dtype}, accepted with f32"
        )
    if _u(w, 1, 11, 2):
        raise HwUnsupported(f"tensor map: interleave {_INTERLEAVES[_u(w, 1, 11, 2)]} is not modelled, only none")
    if _u(w, 1, 19, 2):
        raise HwUnsupported(f"tensor map: swizzle atom {_ATOMS[_u(w, 1, 19, 2)]} is not modelled, only 16B")
    if rank > 5:
        raise HwError(f"tensor map: rank {rank}, accepted 1 to 5")
    low = (_u(w, 1, 32, 32), _u(w, 2, 0, 32), _u(w, 2, 32, 32), _u(w, 3, 0, 32))
    strides = tuple((lo | _u(w, 3, 32 + 4 * i, 4) << 32) << 4 for i, lo in enumerate(low))
    dims = tuple(_u(w, 4 + i // 2, 32 * (i % 2), 32) + 1 for i in range(5))
    box = (_u(w, 6, 56, 8) + 1, *(_u(w, 7, 8 * i, 8) + 1 for i in range(4)))
    estrides = tuple(_u(w, 6, 32 + 3 * i, 3) + 1 for i in range(5))
    tmap = TensorMap(
        w[0] & ((1 << 57) - 1),
        dtype,
        esize,
        dims[:rank],
        strides[: rank - 1],
        box[:rank],
        estrides[:rank],
        SWIZZLES[_u(w, 1, 13, 2)],
        "nan" if _u(w, 1, 15, 1) else "zero",
    )
    if check:
        _check(tmap)
    return tmap


def _fail(message):
    raise HwError(message)


def _check(t: TensorMap) -> None:
    """The rules of cuTensorMapEncodeTiled for interleave none."""
    if t.address % 16:
        _fail(f"tensor map: global address {t.address:#x}, accepted multiples of 16")
    for i, s in enumerate(t.strides):
        if s % 16 or not 0 < s < 1 << 40:
            _fail(f"tensor map: stride of dimension {i + 1} is {s} bytes, accepted multiples of 16 below 2^40")
    inner = t.box[0] * t.esize
    if inner % 16:
        _fail(f"tensor map: inner box extent {t.box[0]} x {t.esize} bytes = {inner}, accepted multiples of 16 bytes")
    if t.swizzle != "none" and inner > SWIZZLE_SPAN[t.swizzle]:
        _fail(
            f"tensor map: inner box extent {inner} bytes exceeds the {SWIZZLE_SPAN[t.swizzle]} of swizzle {t.swizzle}"
        )
    if t.fill == "nan" and t.dtype[0] in "us":
        _fail(f"tensor map: NaN fill with element type {t.dtype}, accepted with floating-point types")


def encode(
    *, address: int, dtype: str, dims, strides, box, swizzle: str = "none", fill: str = "zero", estrides=None
) -> bytes:
    """The 128 bytes of a tiled map (bytes 64-127 zero); strides in bytes for dimensions 1 .. rank-1. For tests.

    Truncates like the real writers do: low four bits of the address and of each stride are lost.
    """
    rank = len(dims)
    if not (1 <= rank <= 5 and len(strides) == rank - 1 and len(box) == rank):
        raise HwError(
            f"dims, strides, box: lengths {rank}, {len(strides)}, {len(box)}; accepted n, n-1, n for n in 1..5"
        )
    if min(box) < 1 or max(box) > _MAX_BOX:
        raise HwError(f"box: {tuple(box)}, accepted extents 1 to {_MAX_BOX}")
    estrides = tuple(estrides or (1,) * rank)
    code = _CODES[dtype] if dtype in _CODES else _CODES_TF32[dtype]
    esize = ELEMENT_TYPES[code][1]
    extent = dims[0] * esize + sum((d - 1) * s for d, s in zip(dims[1:], strides))
    w = [0] * 8
    w[0] = address & ((1 << 57) - 16)
    w[1] = (
        1 << 1
        | (rank - 1) << 4
        | code << 7
        | SWIZZLES.index(swizzle) << 13
        | (fill == "nan") << 15
        | (dtype in _CODES_TF32) << 16
        | 2 << 17
        | (extent >= 131072) << 21
    )
    s = [(x >> 4) & ((1 << 36) - 1) for x in strides] + [0] * 4
    w[1] |= (s[0] & 0xFFFFFFFF) << 32
    w[2] = (s[1] & 0xFFFFFFFF) | (s[2] & 0xFFFFFFFF) << 32
    w[3] = (s[3] & 0xFFFFFFFF) | sum((s[i] >> 32) << (32 + 4 * i) for i in range(4))
    d = [(x - 1) & 0xFFFFFFFF for x in dims] + [0] * 5
    w[4], w[5], w[6] = d[0] | d[1] << 32, d[2] | d[3] << 32, d[4]
    b = [(x - 1) & 0xFF for x in box] + [0] * 5
    w[6] |= b[0] << 56 | sum(((x - 1) & 7) << (32 + 3 * i) for i, x in enumerate(estrides))
    w[7] = sum(b[1 + i] << 8 * i for i in range(4))
    return struct.pack("<8Q", *w) + bytes(64)
