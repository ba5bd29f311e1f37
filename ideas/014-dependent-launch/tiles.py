"""What the phases of the preparation kernel share: sizes, the tile layout, block pairs (prep.py)."""

from __future__ import annotations

from cutlass import Int32, select_

CHUNK, BLOCK = 64, 16
ROW = 128  # bytes of a tile row
TILE = CHUNK * ROW
PAIRS = ((0, 0), (1, 1), (2, 2), (3, 3), (1, 0), (2, 0), (2, 1), (3, 0), (3, 1), (3, 2))  # (query block, key block)


def code(values) -> int:
    """Numbers 0..3 as two bits each, to be looked up by a register."""
    return sum(v << (2 * i) for i, v in enumerate(values))


def pick(index: Int32, values):
    """values[index] for an index in a register."""
    out = values[-1]
    for j in reversed(range(len(values) - 1)):
        out = select_(index == j, values[j], out)
    return out


def swizzled(lane: Int32):
    """Offsets of 16-byte chunk 2 j + lane / 16 of row lane % 16, for j = 0..3: an A fragment as ldmatrix.x4 reads it.
    Each phase asks with a fresh `lane`, so that none holds another's addresses in registers."""
    return [(((lane >> 4) ^ (lane & 7)) << 4) ^ (j << 5) for j in range(4)]
