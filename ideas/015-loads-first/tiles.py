"""What the phases share: sizes, the tile layout, block pairs (forward.py)."""

from __future__ import annotations

from cutlass import Int32, select_

CHUNK, BLOCK = 64, 16
WG_V = 64  # columns of V a warpgroup of SCAN owns: the M of a wgmma
WALK = 3  # chunks that a share may walk before it begins; no share is smaller (kernel.py, even)
APART = 14 << 7  # 2^14 as bits of bf16
INFINITE = 0x7F80
SLOTS = 2  # chunks between PREP and SCAN
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


def keys_of(lane: Int32):
    """(row, chunk) of 16 rows x 2 chunks that a lane names so that ldmatrix.x4 leaves the B fragments of m16n8k16 in
    neighbouring registers, as HMMA wants them: rows 8 n to 8 n + 7 in registers 2 n and 2 n + 1."""
    return (lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1
