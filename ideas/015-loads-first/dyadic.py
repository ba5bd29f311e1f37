"""Scores of the 16 x 16 diagonal blocks where no bound on the gate is known (forward.py, phase A1').

A pair (i, j), i > j, parts at level s, the highest bit in which i and j differ. With m the first row of i's half at
that level, its decay 2^(L_i - L_j) is the product of 2^(L_i - L_{m-1}) and 2^(L_{m-1} - L_j), both at most 1: one
factor per row, level and channel. A level's product is taken over the whole block and kept where pairs part at that
level.

L in shared memory: fp32, 256-byte rows of 64 channels, the 32-byte groups of row r permuted by xor with r % 4, so that
the four rows x four lanes of an 8-byte fragment read meet in no bank.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, select_

from . import ptx
from .tiles import BLOCK, CHUNK, ROW, TILE


class Dyadic:
    """Phase A1' of PREP. Scores are 16 registers: (q or k scores, column half, accumulator register)."""

    def local_rows(self, x):
        """Addresses of this thread's two channels in its 16 rows of L."""
        base = x.local[0]
        if self.K > 64:
            base = select_(x.channel >= 64, x.local[1], x.local[0])
        base = base + x.blk * (BLOCK * 256)
        return [base + i * 256 + ((x.lane * 8) ^ ((i & 3) << 5)) for i in range(BLOCK)]

    def store_local(self, x) -> None:
        for at, total in zip(self.local_rows(x), x.sums):
            ptx.sts_vec(at, total)

    def load_local(self, x):
        return [ptx.lds_vec(at, 2, 0, Float32) for at in self.local_rows(x)]

    def diagonal_scores(self, x) -> cute.Tensor:
        """Scores below the diagonal of block warp % 4. Of 8 warps, the first four do levels 8 and 4, the others 2 and 1
        (entries of other levels mean nothing); 4 warps do them all."""
        scores = cute.make_rmem_tensor(16, Float32)
        scores.fill(0.0)
        self.levels(x, scores)
        return scores

    @cute.jit
    def levels(self, x, scores: cute.Tensor):
        s = Int32(8)
        if cutlass.const_expr(self.warps == 8):
            s = select_((x.warp >> 2) == 0, Int32(8), Int32(2))
        for _ in cutlass.range(2 if self.warps == 8 else 4, unroll=1):
            self.level(x, s, scores)
            s = s >> 1

    @cute.jit
    def level(self, x, s: Int32, scores: cute.Tensor):
        """Put level s's scores into `scores`."""
        lane, block = ptx.fresh(x.lane), x.warp & 3
        rows = (block * BLOCK + (lane & 15)) * ROW
        sides = self.exponent_rows(lane, block, s)
        acc = cute.make_rmem_tensor(16, Float32)
        acc.fill(0.0)
        for kk in cutlass.range(self.K // 16, unroll=1):
            at = rows + (kk >> 2) * TILE + ((((lane >> 4) ^ (lane & 7)) << 4) ^ ((kk & 3) << 5))
            base = x.local[0] + (kk >> 2) * (x.local[1] - x.local[0])
            exponents = [[base + r + (((kk & 3) << 6) ^ xor) for r, xor in side] for side in sides]
            self.step(acc, x.raw + at, *exponents)
        self.keep(x, s, 2 * s, scores, acc)

    def exponent_rows(self, lane: Int32, block: Int32, s: Int32):
        """Of the lane's two rows: which rows of L to subtract from which, each as (offset, permutation)."""
        plus, minus = [], []
        for h in range(2):
            row = (lane >> 2) + 8 * h
            anchor = (row & (-2 * s)) + s - 1
            later = (row & s) != 0
            for side, r in ((plus, select_(later, row, anchor)), (minus, select_(later, anchor, row))):
                side.append(((block * BLOCK + r) * 256 + (lane & 3) * 8, (r & 3) << 5))
        return plus, minus

    def step(self, acc, raw: Int32, upper, lower) -> None:
        """Accumulate 16 channels. The factors are rounded to io before they meet q and k."""
        sides = [list(ptx.ldmatrix(raw, off)) for off in (0, self.keys)]
        for r in range(4):  # fragment register: row half r % 2, channel half r // 2
            h, other = r % 2, (r // 2) * 32
            plus, minus = (ptx.lds_vec(at[h] ^ other, 2, 0, Float32) for at in (upper, lower))
            factor = ptx.pack(*(ptx.ex2(plus[j] - minus[j]) for j in range(2)), self.pair)
            for side in sides:
                side[r] = ptx.mul_pair(side[r], factor, self.pair)
        for side in range(2):
            for n in range(2):
                at = 8 * side + 4 * n
                out = ptx.mma([acc[at + r] for r in range(4)], sides[side], (sides[1][n], sides[1][n + 2]), self.pair)
                for r in range(4):
                    acc[at + r] = out[r]

    def keep(self, x, low: Int32, high: Int32, scores: cute.Tensor, acc: cute.Tensor) -> None:
        """scores = acc, row and column norms applied, where low <= i ^ j < high."""
        block = (x.warp & 3) * BLOCK
        for n in range(2):
            for r in range(4):
                i, j = (x.lane >> 2) + 8 * (r // 2), 8 * n + 2 * (x.lane & 3) + r % 2
                for side in range(2):
                    at = 8 * side + 4 * n + r
                    value = acc[at]
                    if self.l2norm:
                        value = value * ptx.lds(x.norms + (block + i) * 4, side * CHUNK * 4, Float32)
                        value = value * ptx.lds(x.norms + (block + j) * 4, CHUNK * 4, Float32)
                    kept = select_((i ^ j) < high, value, scores[at])
                    scores[at] = select_((i ^ j) >= low, kept, scores[at])

    def put_diagonal(self, x, scores: cute.Tensor) -> None:
        """Write the warp's block to Aqk and L: with 8 warps, the levels it has done."""
        block = x.warp & 3

        def done(i, j):  # j even: i ^ j and i ^ (j + 1) lie on the same side of 4
            if self.warps == 4:
                return Int32(1)
            return select_(((i ^ j) >= 4) == ((x.warp >> 2) == 0), Int32(1), Int32(0))

        dots, betas = self.row_dots(x, block), self.row_betas(x, block)
        for n in range(2):
            for half in range(2):
                i, j = 8 * half + (x.lane >> 2), n * 8 + 2 * (x.lane & 3)
                value = self.lower([scores[4 * n + 2 * half + r] for r in range(2)], dots[half], i, j)
                word = ptx.pack(value[0], value[1], self.pair)
                ptx.sts_if(done(i, j), 0, self.word(x, x.aqk, block, half, 2 * block + n), word)
            self.put_k_diagonal(x, [scores[8 + 4 * n + r] for r in range(4)], block, n, betas, done)
