"""tcgen05.mma: instruction descriptor, operand and accumulator layouts, the product (sm_100a, .cta_group::1).

PTX ISA, tcgen05: "Instruction descriptor" (table for .kind::tf32 and .kind::f16), "Matrix and Data Movement Shape",
"Data Path Layout Organization" (layout D for M = 128, layout F for M = 64), tcgen05.mma. Operands in shared memory come
through matrix_desc.decode_tcgen05: A is M x K, B is N x K, K-major unless the transpose bit is set.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from .errors import HwError, HwUnsupported
from .numerics import dot_accumulate, widen
from .tmem import COLUMNS, split_address

__all__ = [
    "InstrDesc",
    "decode_idesc",
    "encode_idesc",
    "d_cells",
    "a_cells",
    "read_d",
    "write_d",
    "read_a",
    "mma",
    "check_variant",
]

_F16_TYPES = ("f16", "bf16")
_RESERVED = 1 << 6 | 1 << 23 | 1 << 29


@dataclass(frozen=True)
class InstrDesc:
    """A decoded instruction descriptor.

    m: 64 or 128; n; k: 16 for 16-bit kinds, 8 for tf32; a, b: "bf16", "f16" or "tf32"; negate_a, negate_b;
    major_a, major_b: "K" or "MN". D is fp32.
    """

    m: int
    n: int
    k: int
    a: str
    b: str
    negate_a: bool = False
    negate_b: bool = False
    major_a: str = "K"
    major_b: str = "K"

    @property
    def esize(self) -> int:
        """Bytes of an operand element."""
        return 4 if self.a == "tf32" else 2


def decode_idesc(word: int, kind: str) -> InstrDesc:
    """Decode the 32-bit instruction descriptor of tcgen05.mma.cta_group::1.kind::KIND, kind "f16" or "tf32".

    Raises HwUnsupported for other kinds, sparsity, fp16 accumulators, mixed fp16 and bf16 operands; HwError for shapes
    or types the manual does not have: M 64 with N 8..256 in steps of 8, M 128 with N 16..256 in steps of 16.
    """
    word = int(word)
    where = f"tcgen05.mma.kind::{kind} instruction descriptor {word:#010x}"
    if kind not in ("f16", "tf32"):
        raise HwUnsupported(f"{where}: kind {kind} is not modelled, only f16 and tf32")
    if word >> 2 & 1:
        raise HwUnsupported(f"{where}: sparse A is not modelled")
    if word & _RESERVED or word >> 3 & 1:
        raise HwError(f"{where}: bits {word & (_RESERVED | 8):#x} set, accepted zero (saturate, reserved)")
    d_type, a_type, b_type = word >> 4 & 3, word >> 7 & 7, word >> 10 & 7
    if d_type != 1:
        what = HwUnsupported if d_type == 0 and kind == "f16" else HwError
        raise what(f"{where}: D type code {d_type}, modelled is fp32 (1)")
    a, b = (_operand(code, kind, where) for code in (a_type, b_type))
    if a != b:
        raise HwUnsupported(f"{where}: A of {a} with B of {b} is not modelled")
    m, n = (word >> 24 & 31) << 4, (word >> 17 & 63) << 3
    _check_shape(m, n, where)
    return InstrDesc(
        m,
        n,
        8 if kind == "tf32" else 16,
        a,
        b,
        bool(word >> 13 & 1),
        bool(word >> 14 & 1),
        "MN" if word >> 15 & 1 else "K",
        "MN" if word >> 16 & 1 else "K",
    )


def _operand(code, kind, where):
    if kind == "tf32" and code == 2:
        return "tf32"
    if kind == "f16" and code < len(_F16_TYPES):
        return _F16_TYPES[code]
    raise HwError(f"{where}: operand type code {code}, accepted 2 (tf32) or 0, 1 (f16, bf16)")


def _check_shape(m, n, where):
    step = {64: 8, 128: 16}.get(m)
    if step is None:
        raise HwError(f"{where}: M = {m}, accepted 64 or 128 with .cta_group::1")
    if n % step or not step <= n <= 256:
        raise HwError(f"{where}: N = {n}, accepted multiples of {step} from {step} to 256 with M = {m}")


def encode_idesc(d: InstrDesc) -> int:
    """Inverse of decode_idesc."""
    codes = {"f16": 0, "bf16": 1, "tf32": 2}
    return (
        1 << 4
        | codes[d.a] << 7
        | codes[d.b] << 10
        | d.negate_a << 13
        | d.negate_b << 14
        | (d.major_a == "MN") << 15
        | (d.major_b == "MN") << 16
        | d.n >> 3 << 17
        | d.m >> 4 << 24
    )


@functools.lru_cache(maxsize=8)
def _lanes(m: int) -> np.ndarray:
    """Lane of each row, relative to the address: layout D (row = lane), layout F (16 rows in each warp's quarter)."""
    rows = np.arange(m)
    return rows if m == 128 else rows // 16 * 32 + rows % 16


def _base(taddr: int, m: int, columns: int, what: str) -> tuple[int, int]:
    lane, column = split_address(taddr)
    if lane not in ((0,) if m == 128 else (0, 16)):
        raise HwError(f"tcgen05.mma: {what} at lane {lane}, accepted {'0' if m == 128 else '0 or 16'} with M = {m}")
    if column + columns > COLUMNS:
        raise HwError(f"tcgen05.mma: {what} in columns {column} to {column + columns - 1}, accepted 0-{COLUMNS - 1}")
    return lane, column


def d_cells(taddr: int, m: int, n: int) -> tuple[np.ndarray, slice]:
    """Tensor-memory cells of the fp32 accumulator: (lane of each row [M], slice of N columns); D[i, j] is cell
    (lane[i], first + j).

    M = 128 (layout D): row i in lane i. M = 64 (layout F): row i in lane 32 (i / 16) + i % 16, plus the address's lane
    (0 or 16).
    """
    lane, column = _base(taddr, m, n, "D")
    return _lanes(m) + lane, slice(column, column + n)


def a_cells(taddr: int, m: int, kind: str) -> tuple[np.ndarray, slice]:
    """Cells of A in tensor memory: (lane of each row [M], slice of 8 columns); rows as in d_cells.

    Elements lie along the columns: 16-bit kinds two a cell, even k in the low half (K = 16); tf32 one a cell (K = 8).
    """
    lane, column = _base(taddr, m, 8, "A")
    return _lanes(m) + lane, slice(column, column + 8)


def read_d(tmem: np.ndarray, taddr: int, m: int, n: int) -> np.ndarray:
    """Accumulator values, float32 [..., M, N], from tensor memory, uint32 [..., 128, 512]."""
    lanes, columns = d_cells(taddr, m, n)
    return np.ascontiguousarray(tmem[..., lanes, columns]).view(np.float32)


def write_d(tmem: np.ndarray, taddr: int, d: np.ndarray, disable: int = 0) -> None:
    """Store float32 [..., M, N] as the accumulator. disable: 128-bit disable-output-lane vector, bit i for lane i."""
    lanes, columns = d_cells(taddr, *d.shape[-2:])
    bits = np.ascontiguousarray(d, dtype=np.float32).view(np.uint32)
    if disable:
        keep = np.array([not disable >> int(lane) & 1 for lane in lanes])
        lanes, bits = lanes[keep], bits[..., keep, :]
    tmem[..., lanes, columns] = bits


def read_a(tmem: np.ndarray, taddr: int, m: int, kind: str) -> np.ndarray:
    """Raw bits of A in tensor memory, uint16 [..., M, 16] or uint32 [..., M, 8]."""
    lanes, columns = a_cells(taddr, m, kind)
    cells = np.ascontiguousarray(tmem[..., lanes, columns])
    return cells if kind == "tf32" else cells.view(np.uint16)


def mma(a_bits, b_bits, d, idesc: InstrDesc, *, accumulate: bool = True, model: str = "fused") -> np.ndarray:
    """One tcgen05.mma: float32 [M, N] after the instruction. Leading axes (CTAs) are batched.

    a_bits: raw bits [M, K] (read_a or matrix_desc.gather_operand); b_bits: raw bits [N, K]; d: values before it,
    ignored when accumulate (enable-input-d) is false. Numerics: numerics.dot_accumulate.
    """
    if a_bits.shape[-2:] != (idesc.m, idesc.k) or b_bits.shape[-2:] != (idesc.n, idesc.k):
        raise HwError(
            f"tcgen05.mma: A {a_bits.shape}, B {b_bits.shape}, accepted {(idesc.m, idesc.k)} and {(idesc.n, idesc.k)}"
        )
    a, b = widen(a_bits, idesc.a), widen(b_bits, idesc.b)
    if idesc.negate_a != idesc.negate_b:
        a = -a
    return dot_accumulate(a, b.swapaxes(-1, -2), d if accumulate else None, idesc.a, model)


def check_variant(opcode: str) -> str:
    """The kind ("f16" or "tf32") of a dotted tcgen05.mma opcode; HwUnsupported for the variants not modelled."""
    parts = opcode.split(".")
    for part in ("ws", "sp", "block_scale", "cta_group::2", "ashift"):
        if part in parts:
            raise HwUnsupported(f"{opcode}: .{part} is not modelled")
    kinds = [p.split("::")[1] for p in parts if p.startswith("kind::")]
    if kinds not in (["f16"], ["tf32"]):
        raise HwUnsupported(f"{opcode}: kind {kinds} is not modelled, only f16 and tf32")
    return kinds[0]
