"""Tensor memory: addresses, the tcgen05.ld/st fragments, the column allocator (sm_100a).

PTX ISA, tcgen05: "Tensor Memory Addressing", "Tensor Memory Allocation", "Access restrictions", "Data Movement Shape"
with its fragment figures, and the instructions tcgen05.ld, .st, .alloc, .dealloc, .relinquish_alloc_permit. Tensor
memory is 128 lanes by 512 columns of 32 bits; an address is lane << 16 | column. Warp w of a CTA reaches lanes 32 (w %
4) and the 31 after it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from .errors import HwError, HwUnsupported

__all__ = [
    "LANES",
    "COLUMNS",
    "split_address",
    "Fragment",
    "fragment",
    "check_access",
    "load",
    "store",
    "Allocator",
    "SHAPES",
    "refuse",
]

LANES, COLUMNS = 128, 512
SHAPES = {"32x32b": 1, "16x64b": 1, "16x128b": 2, "16x256b": 4, "16x32bx2": 1}  # shape -> registers at .x1
_MAX_REGISTERS = 128
_MIN_ALLOC = 32


def split_address(taddr: int) -> tuple[int, int]:
    """(lane, column) of a tensor-memory address. Raises HwError outside 128 x 512."""
    lane, column = int(taddr) >> 16 & 0xFFFF, int(taddr) & 0xFFFF
    if lane >= LANES or column >= COLUMNS:
        raise HwError(
            f"tensor-memory address {taddr:#010x}: lane {lane}, column {column}; accepted lanes 0-127, columns 0-511"
        )
    return lane, column


@dataclass(frozen=True)
class Fragment:
    """Where the registers of one tcgen05.ld or .st lie, relative to the lane and column of its address.

    lane, column    int [registers, 32]: register r of thread t is the 32-bit cell (lane[r, t], column[r, t])
    packed          False; or True with .pack::16b / .unpack::16b: the low half of the register is the low 16 bits of
                    that cell and its high half the low 16 bits of the cell one column to the right
    lanes, columns  extent touched, from the address on: 16 or 32 lanes; the number of columns
    """

    lane: np.ndarray
    column: np.ndarray
    packed: bool
    lanes: int
    columns: int


@functools.lru_cache(maxsize=256)
def fragment(shape: str, num: int, packed: bool = False, split: int = 0) -> Fragment:
    """The fragment of .shape.xNUM; split is immHalfSplitoff of 16x32bx2 (columns). Raises HwError.

    With thread t and register r, at .x1 and repeated rightwards (figures of section "Data Movement Shape"):
      32x32b    lane t,                              column r
      16x64b    lane t / 4 + 8 (t % 2),              column t / 2 % 2 + 2 r
      16x128b   lane t / 4 + 8 (r % 2),              column t % 4 + 4 (r / 2)
      16x256b   lane t / 4 + 8 (r / 2 % 2),          column 2 (t % 4) + r % 2 + 8 (r / 4)
      16x32bx2  lane t % 16,                         column r + split (t / 16)
    Packing doubles every column (the split excepted, which counts real columns).
    """
    if shape not in SHAPES:
        raise HwError(f"tcgen05.ld/st shape .{shape}, accepted {tuple(SHAPES)}")
    registers = SHAPES[shape] * num
    if num < 1 or num & (num - 1) or registers > _MAX_REGISTERS:
        raise HwError(
            f"tcgen05.ld/st .{shape}.x{num}: accepted powers of two up to .x{_MAX_REGISTERS // SHAPES[shape]}"
        )
    t, r = np.arange(32)[None, :], np.arange(registers)[:, None]
    lane, column = {
        "32x32b": lambda: (t, r),
        "16x64b": lambda: (t // 4 + 8 * (t % 2), t // 2 % 2 + 2 * r),
        "16x128b": lambda: (t // 4 + 8 * (r % 2), t % 4 + 4 * (r // 2)),
        "16x256b": lambda: (t // 4 + 8 * (r // 2 % 2), 2 * (t % 4) + r % 2 + 8 * (r // 4)),
        "16x32bx2": lambda: (t % 16, r),
    }[shape]()
    lane, column = np.broadcast_arrays(lane, column)
    column = column * (2 if packed else 1)
    if shape == "16x32bx2":
        column = column + split * (t // 16)
    lane, column = np.ascontiguousarray(lane), np.ascontiguousarray(column)
    return Fragment(lane, column, packed, int(lane.max()) + 1, int(column.max()) + 1 + packed)


def check_access(frag: Fragment, taddr: int, warp: int) -> tuple[int, int]:
    """(lane, column) of the address if warp `warp` of the CTA may use it with this fragment; else HwError.

    The lanes must lie in the warp's quarter: a 32-lane shape starts on it, a 16-lane shape on it or 16 lanes on.
    """
    lane, column = split_address(taddr)
    first = 32 * (warp % 4)
    if lane - first not in ((0,) if frag.lanes == 32 else (0, 16)):
        raise HwError(
            f"tensor-memory address {taddr:#010x}: lane {lane} for a {frag.lanes}-lane access by warp {warp}, which "
            f"reaches lanes {first} to {first + 31}"
        )
    last = column + frag.columns - 1
    if last >= COLUMNS:
        raise HwError(f"tensor-memory address {taddr:#010x}: columns {column} to {last}, accepted 0-{COLUMNS - 1}")
    return lane, column


def load(tmem: np.ndarray, frag: Fragment, taddr: int, warp: int) -> np.ndarray:
    """tcgen05.ld: registers, uint32 [..., registers, 32], from tensor memory, uint32 [..., 128, 512]."""
    lane, column = check_access(frag, taddr, warp)
    cells = tmem[..., frag.lane + lane, frag.column + column]
    if not frag.packed:
        return cells
    return cells & 0xFFFF | tmem[..., frag.lane + lane, frag.column + (column + 1)] << 16


def store(tmem: np.ndarray, frag: Fragment, taddr: int, warp: int, registers: np.ndarray) -> None:
    """tcgen05.st: registers, uint32 [..., registers, 32], into tensor memory. Unpacked halves go to the low 16 bits of
    each cell; the high 16 bits become zero (the manual does not say what they hold)."""
    lane, column = check_access(frag, taddr, warp)
    if not frag.packed:
        tmem[..., frag.lane + lane, frag.column + column] = registers
        return
    tmem[..., frag.lane + lane, frag.column + column] = registers & 0xFFFF
    tmem[..., frag.lane + lane, frag.column + (column + 1)] = registers >> 16


class Allocator:
    """The columns of one SM's tensor memory as one CTA sees them (tcgen05.alloc, .dealloc, .relinquish_alloc_permit).

    Allocation is first fit from column 0. Instructions of other CTAs on the SM are not modelled, so an alloc that does
    not fit can only wait for this CTA's own dealloc.
    """

    def __init__(self):
        self.live: dict[int, int] = {}  # first column -> number of columns
        self.freed: set[int] = set()
        self.relinquished = False

    def alloc(self, columns: int) -> int | None:
        """Address (lane 0) of `columns` new columns, or None when they do not fit now (the instruction blocks).

        Raises HwError unless columns is a power of two from 32 to 512, and after relinquish.
        """
        self._check_size("alloc", columns)
        if self.relinquished:
            raise HwError("tcgen05.alloc: the CTA has relinquished its permit to allocate")
        start = 0
        for used in sorted(self.live):
            if used - start >= columns:
                break
            start = used + self.live[used]
        if start + columns > COLUMNS:
            return None
        self.live[start] = columns
        self.freed.discard(start)
        return start

    def dealloc(self, taddr: int, columns: int) -> None:
        """Free one allocation, given its address and size. Raises HwError otherwise, naming a double free as such."""
        self._check_size("dealloc", columns)
        _, column = split_address(taddr)
        if int(taddr) >> 16 or column not in self.live:
            what = "was already freed" if column in self.freed else "was never allocated"
            raise HwError(f"tcgen05.dealloc: address {taddr:#010x} {what}; live: {self.describe()}")
        if self.live[column] != columns:
            raise HwError(f"tcgen05.dealloc: {columns} columns at {taddr:#010x}, allocated were {self.live[column]}")
        del self.live[column]
        self.freed.add(column)

    def relinquish(self) -> None:
        """tcgen05.relinquish_alloc_permit: no alloc may follow; dealloc still may."""
        self.relinquished = True

    def allocated(self, column: int, columns: int = 1) -> bool:
        """Whether all of [column, column + columns) lies in live allocations."""
        covered = column
        for start in sorted(self.live):
            if start <= covered < start + self.live[start]:
                covered = start + self.live[start]
        return covered >= column + columns

    def leaks(self) -> list[tuple[int, int]]:
        """(first column, columns) still allocated; must be empty when the CTA exits."""
        return sorted(self.live.items())

    def describe(self) -> str:
        return ", ".join(f"columns {s}-{s + n - 1}" for s, n in self.leaks()) or "none"

    @staticmethod
    def _check_size(what, columns):
        if not _MIN_ALLOC <= columns <= COLUMNS or columns & (columns - 1):
            raise HwError(f"tcgen05.{what}: {columns} columns, accepted powers of two from {_MIN_ALLOC} to {COLUMNS}")


def refuse(opcode: str) -> None:
    """Refuse by name: tcgen05.cp, tcgen05.shift, tcgen05.ld.red and every .cta_group::2 form."""
    parts = opcode.split(".")
    if len(parts) > 1 and parts[1] in ("cp", "shift"):
        raise HwUnsupported(f"{opcode}: shared-to-tensor-memory copies and shifts are not modelled")
    if "red" in parts or "spcompress" in parts:
        raise HwUnsupported(f"{opcode}: reducing or compressing loads are not modelled")
    if "cta_group::2" in parts:
        raise HwUnsupported(f"{opcode}: .cta_group::2 (two CTAs of a cluster) is not modelled")
