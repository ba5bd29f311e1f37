"""Phase B of the preparation kernel: scores between 16-row blocks, and the tiles they go to (prep.py)."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, select_

from . import ptx
from .tiles import BLOCK, CHUNK, PAIRS, ROW, TILE, code, swizzled


class Scores:
    """Phase B of KdaPrep."""

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
            a_q, a_k = ptx.ldmatrix(x.q + queries + sw, off), ptx.ldmatrix(x.k + queries + sw, off)
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
        queries = x.q + of_k * (x.k - x.q) + (a * BLOCK + (lane & 15)) * ROW
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

    # Score tiles: Aqk and A^T over kD, the two halves of -L and D over q.

    def word(self, x, tile: Int32, row_block: Int32, half: int, chunk: Int32):
        """Address of the lane's word of an accumulator's row half in 16-byte chunk `chunk` of a score tile."""
        g = x.lane >> 2
        return tile + (row_block * BLOCK + 8 * half + g) * ROW + ((chunk ^ g) << 4) + (x.lane & 3) * 4

    @cute.jit
    def clear_upper(self, x):
        """Zeros in Aqk's six blocks above the diagonal, a warp each."""
        for n in cutlass.range_constexpr(-(-6 // self.warps)):
            block = x.warp + self.warps * n
            if block < 6:
                rows, columns = (Int32(code(s)) for s in ((0, 0, 0, 1, 1, 2), (1, 2, 3, 2, 3, 3)))
                row = ((rows >> (2 * block)) & 3) * BLOCK + (x.lane >> 1)
                chunk = ((columns >> (2 * block)) & 3) * 2 + (x.lane & 1)
                ptx.sts_vec(x.kd + row * ROW + ((chunk ^ (row & 7)) << 4), [Int32(0)] * 4)

    def put_q(self, x, acc, a, b, n, exact: bool = False) -> None:
        """Four registers of q scores at column half n (a number or a register) of block (a, b), masked, into Aqk.
        exact: it is a diagonal block, whose own diagonal comes from `dots`."""
        for half in range(2):
            i, j = a * BLOCK + 8 * half + (x.lane >> 2), b * BLOCK + n * 8 + 2 * (x.lane & 3)
            value = [select_(j + r <= i, acc[2 * half + r] * x.scale, Float32(0.0)) for r in range(2)]
            if exact and half == n:
                dot = ptx.lds(x.dots + i * 4, 0, Float32) * x.scale
                for side in range(2 if self.l2norm else 0):
                    dot = dot * ptx.lds(x.norms + i * 4, side * CHUNK * 4, Float32)
                value = [select_(j + r == i, dot, value[r]) for r in range(2)]
            ptx.sts(self.word(x, x.kd, a, half, 2 * b + n), ptx.pack(value[0], value[1], self.pair))

    def put_k(self, x, acc, a, b, n) -> None:
        """Likewise -beta times k scores of a block below the diagonal, split in two."""
        for half in range(2):
            beta = ptx.lds(x.beta + (a * BLOCK + 8 * half + (x.lane >> 2)) * 4, 0, Float32)
            high, low = ptx.split(*(-(acc[2 * half + r] * beta) for r in range(2)))
            at = self.word(x, x.q, a, half, 2 * b + n)
            ptx.sts(at, high)
            ptx.sts(at, low, TILE)

    def put_k_diagonal(self, x, acc, a, n, keep=None) -> None:
        """Likewise beta times k scores of a diagonal block, strictly lower, in fp32. keep(i, j): words to write."""
        for half in range(2):
            i, j = 8 * half + (x.lane >> 2), n * 8 + 2 * (x.lane & 3)
            beta = ptx.lds(x.beta + (a * BLOCK + i) * 4, 0, Float32)
            value = [select_(j + r < i, acc[2 * half + r] * beta, Float32(0.0)) for r in range(2)]
            at = x.diagonal + ((a * BLOCK + i) * BLOCK + j) * 4
            for r in range(2):
                if keep is None:
                    ptx.sts(at, value[r], 4 * r)
                else:
                    ptx.sts_if(keep(i, j), 0, at, value[r], 4 * r)

    @cute.jit
    def put_pair(self, x, scores, p: Int32):
        a, b = self.blocks_of(p)
        if p < 4:
            for n in cutlass.range_constexpr(2):
                self.put_q(x, scores[0][n], a, b, n, exact=True)
                self.put_k_diagonal(x, scores[1][n], a, n)
        else:
            for n in cutlass.range_constexpr(2):
                self.put_q(x, scores[0][n], a, b, n)
                self.put_k(x, scores[1][n], a, b, n)

    @cute.jit
    def put_strip(self, x, acc, m: Int32, first: cutlass.Constexpr):
        p, of_k, half = self.strip(m, first)
        a, b = self.blocks_of(p)
        if of_k == 1:
            self.put_k(x, acc, a, b, half)
        else:
            self.put_q(x, acc, a, b, half)
