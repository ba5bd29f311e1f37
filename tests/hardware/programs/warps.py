"""Instructions across the lanes of a warp (PTX ISA, shfl.sync, "Parallel Synchronization and Communication Instructions":
vote.sync, redux.sync, elect.sync). One warp per 32 elements; the expected values are loops over lanes.
"""

from __future__ import annotations

import functools

import numpy as np

from .integers import signed
from .program import generator, lanes

N = 256


def by_warp(fn):
    """fn(list of a warp's 32 rows) -> 32 results, over whole arrays."""

    def manual(inputs):
        rows = list(zip(*(x.tolist() for x in inputs.values()), strict=True))
        out = [y for w in range(0, N, 32) for y in fn(rows[w : w + 32])]
        return {"y": np.array([y & 0xFFFFFFFF for y in out], np.uint32)}

    return manual


def source_lane(mode: str, lane: int, b: int, c: int) -> tuple[int, bool]:
    """(lane read from, in range) of shfl: c holds the clamp in bits 0-4 and the segment mask in bits 8-12."""
    b, clamp, segment = b & 31, c & 31, c >> 8 & 31
    highest = (lane & segment) | (clamp & ~segment & 31)
    j = {"up": lane - b, "down": lane + b, "bfly": lane ^ b, "idx": (lane & segment) | (b & ~segment & 31)}[mode]
    inside = j >= highest if mode == "up" else j <= highest
    return (j if inside else lane), inside


def shuffle(mode: str, c: int, width: str):
    """The value read, with the predicate in bit 31."""

    def fn(rows):
        found = [source_lane(mode, lane, rows[lane][1], c) for lane in range(32)]
        return [rows[j][0] | inside << 31 for j, inside in found]

    rng = generator(f"shfl {mode} {width}")
    b = np.repeat(rng.integers(0, 32, N // 32), 32) if mode != "idx" else rng.integers(0, 40, N)
    given = {"a": rng.integers(0, 1 << 31, N).astype(np.uint32), "b": b.astype(np.uint32)}
    body = f"shfl.sync.{mode}.b32 y|%p1, a, b, {c}, -1; selp.b32 %r1, 0x80000000, 0, %p1; or.b32 y, y, %r1;"
    return lanes(f"shfl.sync.{mode}.b32 {width}", body, given, {"y": np.uint32}, by_warp(fn))


def vote(mode: str, partial: bool):
    """Over all lanes, or (partial) over the odd ones, which alone execute it."""

    def fn(rows):
        members = [i for i in range(32) if i & 1 or not partial]
        yes = [bool(rows[i][0] & 1) for i in members]
        result = {"all": all(yes), "any": any(yes), "uni": len(set(yes)) == 1,
                  "ballot": sum(1 << i for i, y in zip(members, yes, strict=True) if y)}[mode]  # fmt: skip
        return [int(result) if i in members else 0 for i in range(32)]

    rng = generator(f"vote {mode} {partial}")
    a = rng.integers(0, 2, N).astype(np.uint32)
    a[:32], a[32:64] = 0, 1
    op = "vote.sync.ballot.b32 y" if mode == "ballot" else f"vote.sync.{mode}.pred %p2"
    mask, guard = ("0xaaaaaaaa", "and.b32 %r1, %t, 1; setp.eq.u32 %p3, %r1, 0; @%p3 bra OVER;") if partial else ("-1", "")
    body = (f"mov.b32 y, 0; {guard} and.b32 %r2, a, 1; setp.ne.u32 %p1, %r2, 0; {op}, %p1, {mask};"
            + ("" if mode == "ballot" else "selp.b32 y, 1, 0, %p2;")
            + (" OVER: bar.warp.sync -1;" if partial else ""))  # fmt: skip
    return lanes(f"vote.sync.{mode}{' partial' if partial else ''}", body, {"a": a}, {"y": np.uint32}, by_warp(fn))


REDUCE = {
    "add.u32": lambda x, y: x + y, "min.u32": min, "max.u32": max, "and.b32": lambda x, y: x & y,
    "or.b32": lambda x, y: x | y, "xor.b32": lambda x, y: x ^ y,
    "add.s32": lambda x, y: x + y, "min.s32": lambda x, y: min(x, y, key=signed), "max.s32": lambda x, y: max(x, y, key=signed),
}  # fmt: skip


def reduction(op: str):
    rng = generator(f"redux {op}")
    a = (rng.integers(0, 1 << 32, N, np.uint64) >> rng.integers(0, 32, N).astype(np.uint64)).astype(np.uint32)
    a |= np.uint32(0x00100400 if op == "and.b32" else 0)
    fn = by_warp(lambda rows: [functools.reduce(REDUCE[op], (r[0] for r in rows))] * 32)
    return lanes(f"redux.sync.{op}", f"redux.sync.{op} y, a, -1;", {"a": a}, {"y": np.uint32}, fn)


def elected():
    """Exactly one lane of the warp is elected, and every lane is told the same; the manual leaves open which. Kept: how many
    were, and how many lanes were told that lane."""
    body = ("elect.sync %r1|%p1, -1; vote.sync.ballot.b32 %r2, %p1, -1; popc.b32 %r3, %r2; shl.b32 %r4, 1, %r1;"
            "setp.eq.u32 %p2, %r4, %r2; vote.sync.ballot.b32 %r5, %p2, -1; popc.b32 %r5, %r5;"
            "mad.lo.u32 y, %r5, 256, %r3;")  # fmt: skip
    return lanes("elect.sync", body, {"a": np.zeros(N, np.uint32)}, {"y": np.uint32}, by_warp(lambda rows: [32 * 256 + 1] * 32))


PROGRAMS = [
    *(shuffle(mode, 0 if mode == "up" else 31, "whole") for mode in ("up", "down", "bfly", "idx")),
    *(shuffle(mode, 0x1800 | (0 if mode == "up" else 31), "segments of 8") for mode in ("up", "down", "bfly", "idx")),
    shuffle("down", 0x1C05, "clamped"),
    *(vote(mode, partial) for mode in ("all", "any", "uni", "ballot") for partial in (False, True)),
    *map(reduction, REDUCE), elected(),
]  # fmt: skip
