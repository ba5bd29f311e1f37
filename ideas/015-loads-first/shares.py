"""Every CTA the same number of chunks, whichever rows they belong to, where each cut's state is known to have faded.

A strip is a row (batch, value head) at one tile of V; the chunks of all strips, one strip after the other, are cut into
as many shares as there are CTAs. A share that begins inside a strip walks `walks[i]` chunks before it for the state alone, from zero
(cuts.py: what it drops arrives 2^-40 as large or less; at the strip's first chunk it begins with h0 and drops nothing).
Where any cut stays open this kernel does nothing, and rung 010's, launched after it, everything.

2^-40 of what? A state that had been 2^30 times as large as any that follows would still be seen, and a NaN in it always.
So each CTA tells the largest |h| that it had where the next one starts from zero (`dropped`; 0 if nothing is), and the least
that the largest |h| was at the end of any chunk from its own cut to the row's end or its own (`least`). Unless dropped[i] is finite and
at most 2^14 least[i + 1], for all i, 010's kernel does everything again. With sqrt(K V) <= 2^8 between the largest entry and the
norm, what a kept cut drops is at no chunk's end more than 2^-18 of the state; io's rounding is 2^-9.
"""

from __future__ import annotations

from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
from cutlass import Int32, select_

from . import ptx
from .tiles import SLOTS, WALK


def begin(total: Int32, ctas: Int32, i: Int32) -> Int32:
    """Where share i of all chunks begins, and share i - 1 ends."""
    return total // ctas * i + cutlass.min(i, total % ctas)


class Shares:
    """What Helpers is to a walk of whole rows, and a CTA's walk over its pieces of strips."""

    receives, tells = False, True

    def __init__(self, dtype: str = "bfloat16", **params):
        """params: Forward.__init__. ValueError: a parameter outside its domain."""
        if dtype != "bfloat16":
            raise ValueError(f"dtype: got {dtype}, accepted bfloat16 for shares")
        super().__init__(dtype=dtype, **params)

    def plan_of(self, bid, turns, size, walks) -> SimpleNamespace:
        total = size.B * size.HV * size.n_v * size.chunks
        first, end = (begin(total, size.shares, i) for i in (bid, bid + 1))
        return SimpleNamespace(**vars(size), bid=bid, begin=first, end=end, start=first - walks[bid], roams=cutlass.Boolean(True),
                               helps=cutlass.Boolean(False))  # fmt: skip

    def ctas(self, shares: Int32, helpers: Int32, strips: Int32) -> Int32:
        """Of the grid. strips: rows times the tiles of V that a CTA walks."""
        return shares

    def wanted(self, told):
        """Whether all cuts are closed."""
        return self.count_open(told.walks) == 0

    # ---- PREP ------------------------------------------------------------------------------------------------------

    def jobs(self, plan) -> Int32:
        return plan.end - plan.start

    def chunk_at(self, plan, at: Int32) -> SimpleNamespace:
        """Chunk c of batch b, value head hv and V tile u, of the at-th chunk of all."""
        strip = at // plan.chunks
        row = strip // plan.n_v
        return SimpleNamespace(c=at % plan.chunks, b=row // plan.HV, hv=row % plan.HV, u=strip % plan.n_v)

    def first_job(self, plan) -> SimpleNamespace:
        return self.chunk_at(plan, plan.start)

    def next_job(self, plan, job) -> SimpleNamespace:
        """Without a division, which would cost as much as a phase."""
        c = job.c + 1
        strip = c == plan.chunks
        u = job.u + select_(strip, Int32(1), Int32(0))
        row = u == plan.n_v
        hv = job.hv + select_(row, Int32(1), Int32(0))
        batch = hv == plan.HV
        return SimpleNamespace(c=select_(strip, Int32(0), c), b=job.b + select_(batch, Int32(1), Int32(0)),
                               hv=select_(batch, Int32(0), hv), u=select_(row, Int32(0), u))  # fmt: skip

    def place_of(self, plan, job, n: Int32):
        """Slot and phase of the ring of a CTA's n-th job."""
        return n % SLOTS, (n // SLOTS) & 1

    # ---- SCAN ------------------------------------------------------------------------------------------------------

    def piece_at(self, plan, n: Int32, drop: Int32) -> SimpleNamespace:
        """What of a strip the CTA walks from its n-th chunk on (Helpers.row_piece); mark: before which of the strip's chunks the
        next CTA starts from zero, if it is one of these."""
        place = self.chunk_at(plan, plan.start + n)
        return SimpleNamespace(
            n=n, b=place.b, hv=place.hv, u=place.u, first=place.c, chunks=plan.chunks, mark=place.c + drop - n,
            out=place.c + cutlass.max(plan.begin - plan.start - n, 0),
            stop=cutlass.min(plan.chunks, place.c + plan.end - plan.start - n),
        )  # fmt: skip

    def dropped_at(self, plan, walks: cute.Tensor) -> Int32:
        """At which of this CTA's chunks the next CTA starts from zero; -1 if it drops nothing."""
        following = cutlass.min(plan.bid + 1, plan.shares - 1)
        start = plan.end - walks[following]
        drops = (plan.end % plan.chunks > 0) & (start % plan.chunks > 0)  # the last share ends where a strip does
        return select_(drops, start - plan.start, Int32(-1))

    def note(self, peak: Int32, c: Int32, piece, dropped: Int32, least: Int32):
        """(dropped, least) after chunk c of a piece."""
        return (select_(c + 1 == piece.mark, peak, dropped),
                select_(c >= piece.out, cutlass.min(peak, least), least))  # fmt: skip

    @cute.jit
    def tell(self, told, bid: Int32, peaks: Int32, dropped: Int32, least: Int32, warps: cutlass.Constexpr,
             barrier: cutlass.Constexpr):  # fmt: skip
        """This CTA's words, from those of its first `warps` warps. The largest of the warps' least is at most the least of
        what is the largest over all. peaks: shared memory."""
        warp, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()
        if lane == 0:
            ptx.sts(peaks + warp * 8, dropped)
            ptx.sts(peaks + warp * 8, least, 4)
        cute.arch.barrier(barrier_id=barrier, number_of_threads=32 * warps)
        if warp == 0:
            mine = peaks + cutlass.min(lane, warps - 1) * 8
            dropped, least = ptx.redux_max(ptx.lds(mine)), ptx.redux_max(ptx.lds(mine, 4))
            if lane == 0:
                told.dropped[bid] = dropped
                told.least[bid] = least
