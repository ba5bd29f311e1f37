"""Phases D and E of the preparation kernel: A = (I + L)^-1, and the keys that w wants (prep.py)."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32, Int32, select_

from . import ptx
from .tiles import BLOCK, ROW, TILE


class Inverse:
    """Phases D and E of KdaPrep."""

    def invert_diagonal(self, x) -> None:
        """X = (I + L_bb)^-1, a column a lane (the two halves of a warp do the same), by forward substitution: row i is
        e_i - sum_j L_ij X_j. Leaves X split in two, diag(beta) X^T in A^T, and over L what rounding took from that."""
        column, upper = x.lane & 15, x.lane >> 4
        rows = x.diagonal + x.warp * (BLOCK * BLOCK * 4)
        X = [select_(column == i, Float32(1.0), Float32(0.0)) for i in range(BLOCK)]
        for j4 in range(0, BLOCK, 4):
            for i in range(j4 + 1, BLOCK):
                factors = ptx.lds_vec(rows, 4, (i * BLOCK + j4) * 4, Float32)
                for j in range(j4, min(i, j4 + 4)):
                    X[i] = ptx.fma(-factors[j - j4], X[j], X[i])
        chunk = 2 * x.warp + (column >> 3)
        half = upper * TILE + x.warp * (BLOCK * ROW) + (column & 7) * 2  # lower lanes write the high parts
        parts = [ptx.split(X[i], X[i + 1]) for i in range(0, BLOCK, 2)]
        for i in range(BLOCK):
            word = select_(upper == 1, parts[i // 2][1], parts[i // 2][0])
            ptx.sts_half(x.q + half + ((chunk ^ (i & 7)) << 4), (word >> 16) if i % 2 else word, i * ROW)
        beta = ptx.lds(x.beta + (x.warp * BLOCK + column) * 4, 0, Float32)
        parts = [ptx.split(X[i] * beta, X[i + 1] * beta, self.pair) for i in range(0, BLOCK, 2)]
        words, rest = ([select_(upper == 1, parts[4 + i][n], parts[i][n]) for i in range(4)] for n in range(2))
        at = x.kd + TILE + (x.warp * BLOCK + column) * ROW + (((2 * x.warp + upper) ^ (column & 7)) << 4)
        ptx.sts_vec(at, words)
        cute.arch.sync_warp()  # the block of L is read
        ptx.sts_vec(rows + (upper * BLOCK + column) * 16, rest)

    def scale_keys(self, x, t: Int32) -> None:
        """kF 2^N_b over kF in blocks 1 to 3, by 128 threads (t)."""
        row, place = t >> 3, t & 7
        channel = (place ^ (row & 7)) * 8
        for tile in range(self.K // 64):
            for blk in range(1, 4):
                at, off = x.k + row * ROW + place * 16, tile * TILE + blk * BLOCK * ROW
                scale = ptx.lds_vec(x.scales + channel * 2, 4, (blk * self.K + tile * 64) * 2)
                words = ptx.lds_vec(at, 4, off)
                ptx.sts_vec(at, [ptx.mul_pair(words[i], scale[i], self.pair) for i in range(4)], off)

    def invert_column(self, x, b: int) -> None:
        """Blocks below the diagonal of block column b: X_a = D_a sum_c (-L_ac) X_c, kept transposed in registers, where
        the accumulator of one product is the A operand of the next."""
        lane = x.lane
        low = (lane & 7) + ((lane >> 4) & 1) * 8
        start = x.q + (b * BLOCK + low) * ROW + (((2 * b + ((lane >> 3) & 1)) ^ (lane & 7)) << 4)
        X = [ptx.ldmatrix(start, part * TILE, trans=True) for part in range(2)]
        sums = {a: [[Float32(0.0)] * 4 for _ in range(2)] for a in range(b + 1, 4)}
        for c in range(b, 3):
            for a in range(c + 1, 4):
                sums[a] = self.times(x, sums[a], X, a, c)
            a = c + 1
            zero = [[Float32(0.0)] * 4 for _ in range(2)]
            out = self.times(x, zero, self.narrow(sums[a]), a, a)
            if a < 3:
                X = self.narrow(out)
            for half in range(2):
                beta = ptx.lds(x.beta + (b * BLOCK + 8 * half + (lane >> 2)) * 4, 0, Float32)
                for n in range(2):
                    value = [out[n][2 * half + r] * beta for r in range(2)]
                    at = self.word(x, x.kd + TILE, Int32(b), half, Int32(2 * a + n))
                    ptx.sts(at, ptx.pack(value[0], value[1], self.pair))

    def narrow(self, acc):
        """An accumulator of 16 x 16 as the two parts of an A operand."""
        parts = [ptx.split(acc[n][2 * half], acc[n][2 * half + 1]) for n in range(2) for half in range(2)]
        return [p[0] for p in parts], [p[1] for p in parts]

    def times(self, x, acc, left, a: int, c: int):
        """acc + left times the transpose of block (a, c) of the tiles over q, both in two parts."""
        at = x.q + (a * BLOCK + (x.lane & 15)) * ROW + (((2 * c + (x.lane >> 4)) ^ (x.lane & 7)) << 4)
        right = [ptx.ldmatrix(at, part * TILE) for part in range(2)]
        acc = list(acc)
        for l, r in ((0, 1), (1, 0), (0, 0)):
            for n in range(2):
                acc[n] = ptx.mma(acc[n], left[l], (right[r][n], right[r][n + 2]), "bf16")
        return acc
