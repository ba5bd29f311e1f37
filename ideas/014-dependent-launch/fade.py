"""The chunk's fade: a bound on what the chunk leaves of any incoming state, one float in log2 units (prep.py), and where
a segment's walk starts by it (state_sm90.py, state_sm100.py).

A token acts on the state as (I - beta k k^T) diag(2^l) (ALGORITHM.md, 19): its norm is at most 2^max_c(l_c) times
max(1, |beta |k|^2 - 1|), and the second factor is 1 for normalised k and beta in [0, 2]. The fade is the sum of the
logarithms over the chunk's tokens. The largest channel of the summed l would not do: keys carry one channel's state
into another between tokens.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, select_

from . import ptx
from .tiles import BLOCK, CHUNK

CLOSED = -286.0  # log2: what a state comes down by before it counts as zero: one of 2^128 sqrt(K V) is then less than half
# of fp32's least number, 2^-149, whatever came since


class Fade:
    """Part of phase A1 of KdaPrep."""

    def peak(self, x, i: int, steps, kept: Int32) -> Int32:
        """`kept`, in lane i replaced by the bits of the largest of row i's log decays over the warp's 64 channels: that
        of the least magnitude, which for values <= 0 is the least as an unsigned integer. A NaN is less still; a row
        past T has no decay."""
        largest = Float32(select_(x.live > i, ptx.fmax(steps[0], steps[1]), Float32(0.0)))
        return select_(x.lane == i, ptx.redux_min(largest.bitcast(Int32)), kept)

    def store_peaks(self, x, peaks: Int32) -> None:
        """A float a token and 64 channels, in shared memory."""
        at = x.fades + ((x.channel // 64) * CHUNK + x.blk * BLOCK + x.lane) * 4
        ptx.sts_if(BLOCK - x.lane, 0, at, peaks)

    @cute.jit
    def store_fade(self, x, fade: cute.Tensor, element: Int64):
        """One warp: lane = two tokens. Reads the peaks and, where the key's factor must be computed, k's norms and
        beta."""
        total = Float32(0.0)
        for half in cutlass.range_constexpr(2):
            token = (x.lane + 32 * half) * 4
            peak = ptx.lds(x.fades + token, 0, Float32)
            if cutlass.const_expr(self.K > 64):
                peak = ptx.fmax(peak, ptx.lds(x.fades + token, CHUNK * 4, Float32))
            if cutlass.const_expr(self.growth):
                peak = peak + self.key_growth(x, token)
            total = total + peak
        for i in cutlass.range_constexpr(5):
            total = total + cute.arch.shuffle_sync_bfly(total, 1 << i)
        if x.lane == 0:
            flat = cute.make_tensor(fade.iterator + element, cute.make_layout(1))
            flat[0] = total

    def key_growth(self, x, token: Int32) -> Float32:
        """log2 max(1, |beta |k|^2 - 1|)."""
        square = Float32(1.0)
        if not self.l2norm:
            norm = ptx.lds(x.norms + token, CHUNK * 4, Float32)
            square = ptx.rcp(norm * norm) - 1e-6
        reach = ptx.lds(x.beta + token, 0, Float32) * square - 1.0
        reach = ptx.fmax(reach, -reach)
        return select_(reach <= 1.0, Float32(0.0), ptx.lg2(reach))


@cute.jit
def first_chunk(fade: cute.Tensor, b: Int32, hv: Int32, begin: Int32):
    """Where the walk before chunk `begin` starts; the same in every warp. A NaN closes nothing."""
    lane = cute.arch.lane_idx()
    start, total, closed = begin, Float32(0.0), Int32(0)
    while (start > 0) & (closed == 0):
        c = start - 1 - lane
        step = Float32(0.0)
        if c >= 0:
            step = fade[b, c, hv]
        for i in cutlass.range_constexpr(5):  # inclusive sums, from the latest chunk back
            before = cute.arch.shuffle_sync_up(step, 1 << i)
            if lane >= (1 << i):
                step = step + before
        closed = cute.arch.vote_ballot_sync(total + step <= CLOSED)
        total = total + cute.arch.shuffle_sync(step, 31)
        if closed != 0:
            start = start - (cute.arch.popc(closed ^ (closed - 1)))  # the first lane that closes
        else:
            start = cutlass.max(start - 32, 0)
    return cute.arch.make_warp_uniform(start)
