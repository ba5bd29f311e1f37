"""Phases D and E of PREP: -A = -(I + L)^-1, and the operands of SCAN moved to anchor 0 (forward.py)."""

from __future__ import annotations

from cutlass import Float32, Int32, select_

from . import ptx
from .tiles import BLOCK, ROW, SLOTS, TILE, keys_of


class Inverse:
    """Phases D and E of PREP."""

    def invert_diagonal(self, x) -> None:
        """X = (I + L_bb)^-1, a column a lane (the two halves of a warp do the same), by forward substitution: row i is
        e_i - sum_j L_ij X_j. Leaves X split in two, and -X in -A."""
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
            ptx.sts_half(x.kd + half + ((chunk ^ (i & 7)) << 4), (word >> 16) if i % 2 else word, i * ROW)
        words = [ptx.pack(-select_(upper == 1, X[i + 8], X[i]), Float32(0.0), self.pair) for i in range(8)]
        at = x.inverse + (x.warp * BLOCK + upper * 8) * ROW + (column & 7) * 2
        for i in range(8):
            ptx.sts_half(at + ((chunk ^ i) << 4), words[i], i * ROW)

    def scale_operands(self, x, t: Int32) -> None:
        """qF and kF times 2^N_b, in place, in blocks 1 to 3, by 128 threads (t)."""
        row, place = t >> 3, t & 7
        channel = (place ^ (row & 7)) * 8
        at, scales = x.q + row * ROW + place * 16, x.scales + channel * 2
        for tile in range(self.K // 64):
            blocks = [(tile * TILE + blk * BLOCK * ROW, (blk * self.K + tile * 64) * 2) for blk in range(1, 4)]
            factors = [ptx.lds_vec(scales, 4, of_scale) for _, of_scale in blocks]
            for side in range(2):
                places = [side * SLOTS * self.keys + off for off, _ in blocks]
                words = [ptx.lds_vec(at, 4, off) for off in places]  # all of them before the first store
                for off, word, factor in zip(places, words, factors):
                    ptx.sts_vec(at, [ptx.mul_pair(w, f, self.pair) for w, f in zip(word, factor)], off)

    def invert_column(self, x, b: int) -> None:
        """Blocks below the diagonal of block column b: X_a = D_a sum_c (-L_ac) X_c, kept transposed in registers, where
        the accumulator of one product is the A operand of the next."""
        lane = x.lane
        low = (lane & 7) + ((lane >> 4) & 1) * 8
        start = x.kd + (b * BLOCK + low) * ROW + (((2 * b + ((lane >> 3) & 1)) ^ (lane & 7)) << 4)
        X = [ptx.ldmatrix(start, part * TILE, trans=True) for part in range(2)]
        sums = {a: [[Float32(0.0)] * 4 for _ in range(2)] for a in range(b + 1, 4)}
        done = []
        for c in range(b, 3):
            for a in range(c + 1, 4):
                sums[a] = self.times(x, sums[a], X, a, c)
            a = c + 1
            zero = [[Float32(0.0)] * 4 for _ in range(2)]
            out = self.times(x, zero, self.narrow(sums[a]), a, a)
            if a < 3:
                X = self.narrow(out)
            pairs = [[-out[n][2 * half + r] for r in range(2)] for half in range(2) for n in range(2)]
            done.append((a, [ptx.pack(*pair, self.pair) for pair in pairs]))
        at = x.inverse + (lane & 15) * ROW + (((2 * b + (lane >> 4)) ^ (lane & 7)) << 4)
        for a, words in done:
            ptx.stmatrix(at, words, a * BLOCK * ROW, trans=True)

    def narrow(self, acc):
        """An accumulator of 16 x 16 as the two parts of an A operand."""
        parts = [ptx.split(acc[n][2 * half], acc[n][2 * half + 1]) for n in range(2) for half in range(2)]
        return [p[0] for p in parts], [p[1] for p in parts]

    def times(self, x, acc, left, a: int, c: int):
        """acc + left times the transpose of block (a, c) of the tiles over q, both in two parts."""
        row, chunk = keys_of(x.lane)
        at = x.kd + (a * BLOCK + row) * ROW + (((2 * c + chunk) ^ (row & 7)) << 4)
        right = [ptx.ldmatrix(at, part * TILE) for part in range(2)]
        acc = list(acc)
        for l, r in ((0, 1), (1, 0), (0, 0)):
            for n in range(2):
                acc[n] = ptx.mma(acc[n], left[l], right[r][2 * n : 2 * n + 2], "bf16")
        return acc
