"""Phase B of PREP: scores between 16-row blocks, and the tiles they go to (forward.py)."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, select_

from . import ptx
from .tiles import BLOCK, CHUNK, PAIRS, ROW, SLOTS, TILE, code, swizzled


class Scores:
    """Phase B of PREP."""

    def blocks_of(self, p: Int32):
        """(query block, key block) of PAIRS[p]."""
        return tuple((Int32(code(side)) >> (2 * p)) & 3 for side in zip(*PAIRS))

    def pair_scores(self, x, p: Int32):
        """q and k scores of PAIRS[p], 2 column halves x 4 registers each."""
        a, b = self.blocks_of(p)
        lane = ptx.fresh(x.lane)
        at16 = swizzled(lane)
        queries, keys = ((block * BLOCK + (lane & 15)) * ROW for block in (a, b))
        scale = x.scales + select_(p < 4, Int32(0), p) * (self.K * 2) + (lane & 3) * 4
        q, k = ([[Float32(0.0)] * 4 for _ in range(2)] for _ in range(2))
        for kk in range(self.K // 16):
            off, sw = (kk // 4) * TILE, at16[kk % 4]
            a_q, a_k = (ptx.ldmatrix(x.q + queries + sw, off + side * SLOTS * self.keys) for side in range(2))
            raw, to = ptx.ldmatrix(x.kd + keys + sw, off), [ptx.lds(scale, kk * 32 + 16 * r) for r in range(2)]
            key = [ptx.mul_pair(raw[r], to[r // 2], self.pair) for r in range(4)]
            for n in range(2):
                q[n] = ptx.mma(q[n], a_q, (key[n], key[n + 2]), self.pair)
                k[n] = ptx.mma(k[n], a_k, (key[n], key[n + 2]), self.pair)
        return q, k

    def strip(self, m: Int32, first: int):
        """A quarter of a pair: (pair, 1 for k scores, column half)."""
        return first + (m >> 2), (m >> 1) & 1, m & 1

    def strip_scores(self, x, m: Int32, first: int):
        """16 x 8 scores of one side of a pair: 4 registers."""
        p, of_k, half = self.strip(m, first)
        a, b = self.blocks_of(p)
        lane = ptx.fresh(x.lane)
        at16 = swizzled(lane)
        queries = x.q + of_k * (SLOTS * self.keys) + (a * BLOCK + (lane & 15)) * ROW
        keys = x.kd + (b * BLOCK + half * 8 + (lane & 7)) * ROW
        scale = x.scales + p * (self.K * 2) + (lane & 3) * 4
        out = [Float32(0.0)] * 4
        for kk in range(0, self.K // 16, 2):
            off = (kk // 4) * TILE
            raw = ptx.ldmatrix(keys + ((((lane >> 3) ^ (lane & 7)) << 4) ^ ((kk % 4) << 5)), off)
            for n in range(2):
                query = ptx.ldmatrix(queries + at16[(kk + n) % 4], off)
                to = [ptx.lds(scale, (kk + n) * 32 + 16 * r) for r in range(2)]
                key = [ptx.mul_pair(raw[2 * n + r], to[r], self.pair) for r in range(2)]
                out = ptx.mma(out, query, key, self.pair)
        return out

    # The two halves of -L and D lie over kD.

    def word(self, x, tile: Int32, row_block: Int32, half: int, chunk: Int32):
        """Address of the lane's word of an accumulator's row half in 16-byte chunk `chunk` of a score tile."""
        g = x.lane >> 2
        return tile + (row_block * BLOCK + 8 * half + g) * ROW + ((chunk ^ g) << 4) + (x.lane & 3) * 4

    def put_q(self, x, acc, a, b, n, dots=None) -> None:
        """Four registers of q scores at column half n (a number or a register) of block (a, b) into Aqk; dots: of a diagonal
        block's rows (row_dots)."""
        for half in range(2):
            value = [acc[2 * half + r] for r in range(2)]
            if dots is not None:
                i, j = 8 * half + (x.lane >> 2), n * 8 + 2 * (x.lane & 3)
                value = self.lower(value, dots[half], i, j)
            ptx.sts(self.word(x, x.aqk, a, half, 2 * b + n), ptx.pack(value[0], value[1], self.pair))

    def lower(self, value, dot: Float32, i, j):
        """Columns j and j + 1 of row i of a diagonal block: zeros above the diagonal, `dot` on it."""
        return [select_(j + r < i, value[r], select_(j + r == i, dot, Float32(0.0))) for r in range(2)]

    def row_dots(self, x, a) -> list[Float32]:
        """q_i . k_i, normalised, of the lane's two rows of block a."""
        dots = []
        for half in range(2):
            row = (a * BLOCK + 8 * half + (x.lane >> 2)) * 4
            dot = ptx.lds(x.dots + row, 0, Float32)
            for side in range(2 if self.l2norm else 0):
                dot = dot * ptx.lds(x.norms + row, side * CHUNK * 4, Float32)
            dots.append(dot)
        return dots

    def row_betas(self, x, a) -> list[Float32]:
        """beta of the lane's two rows of block a."""
        return [ptx.lds(x.beta + (a * BLOCK + 8 * half + (x.lane >> 2)) * 4, 0, Float32) for half in range(2)]

    def put_k(self, x, acc, a, b, n, betas) -> None:
        """Likewise -beta times k scores of a block below the diagonal, split in two."""
        for half in range(2):
            high, low = ptx.split(*(-(acc[2 * half + r] * betas[half]) for r in range(2)))
            at = self.word(x, x.kd, a, half, 2 * b + n)
            ptx.sts(at, high)
            ptx.sts(at, low, TILE)

    def put_k_diagonal(self, x, acc, a, n, betas, keep=None) -> None:
        """Likewise beta times k scores of a diagonal block, strictly lower, in fp32. keep(i, j): words to write."""
        for half in range(2):
            i, j = 8 * half + (x.lane >> 2), n * 8 + 2 * (x.lane & 3)
            value = [select_(j + r < i, acc[2 * half + r] * betas[half], Float32(0.0)) for r in range(2)]
            at = x.diagonal + ((a * BLOCK + i) * BLOCK + j) * 4
            if keep is None:
                ptx.sts_vec(at, value)
            else:
                for r in range(2):
                    ptx.sts_if(keep(i, j), 0, at, value[r], 4 * r)

    # What does not lie over kD is written early, by who computed it; the rest after all have read kD. Loads stand first: none passes
    # a store.

    @cute.jit
    def put_pair(self, x, scores, p: Int32, early: cutlass.Constexpr):
        a, b = self.blocks_of(p)
        if p < 4:
            if cutlass.const_expr(early):
                dots, betas = self.row_dots(x, a), self.row_betas(x, a)
                for n in cutlass.range_constexpr(2):
                    self.put_q(x, scores[0][n], a, b, n, dots)
                    self.put_k_diagonal(x, scores[1][n], a, n, betas)
        else:
            if cutlass.const_expr(early):
                for n in cutlass.range_constexpr(2):
                    self.put_q(x, scores[0][n], a, b, n)
            else:
                betas = self.row_betas(x, a)
                for n in cutlass.range_constexpr(2):
                    self.put_k(x, scores[1][n], a, b, n, betas)

    @cute.jit
    def put_strip(self, x, acc, m: Int32, first: cutlass.Constexpr, early: cutlass.Constexpr):
        p, of_k, half = self.strip(m, first)
        a, b = self.blocks_of(p)
        if of_k == (0 if early else 1):
            if cutlass.const_expr(early):
                self.put_q(x, acc, a, b, half)
            else:
                self.put_k(x, acc, a, b, half, self.row_betas(x, a))
