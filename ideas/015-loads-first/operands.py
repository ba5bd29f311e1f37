"""Phases A1 and A2 of PREP: gate and cumsum, row norms, beta, decayed operands (forward.py)."""

from __future__ import annotations

import math

import cutlass.cute as cute
from cutlass import Float32, Int32, select_

from . import ptx
from .tiles import BLOCK, CHUNK, PAIRS, ROW, SLOTS, TILE, keys_of, pick, swizzled

LOG2E = math.log2(math.e)
FLOOR = -256.0  # log2 decay of one token below which it is 0 anyway; keeps differences of sums exact


class Operands:
    """Phases A1 and A2 of PREP."""

    channels = 2  # of a thread

    def load_coefficients(self, x, hv, out: cute.Tensor) -> None:
        """A_log of value head hv, and dt_bias of the thread's channels."""
        out.fill(0.0)
        if self.gate != "log":
            out[0] = x.a_log[hv]
            for j in range(self.channels if self.dt_bias else 0):
                out[1 + j] = x.dt_bias[hv * self.K + x.channel + j]

    def gate_coefficients(self, x, loaded: cute.Tensor):
        """Of the exponent, slope and offset per channel; and the factor of what the gate function returns."""
        if self.gate == "log":
            return None
        a = ptx.ex2(loaded[0] * LOG2E)
        slope, factor = (a * (-LOG2E), x.lower_bound * LOG2E) if self.gate == "safe" else (Float32(LOG2E), -a)
        return slope, [slope * loaded[1 + j] for j in range(self.channels)], factor

    def unit_decay(self, value: Float32, coefficients, j: int) -> Float32:
        """What the gate function makes of the gate's value, but for its factor."""
        slope, offset, _ = coefficients
        y = ptx.fma(value, slope, offset[j])
        e = ptx.ex2(y)
        if self.gate == "safe":
            return ptx.rcp(e + 1.0)
        # log2(1 + e): its series where 1 + e would lose digits, y itself where e would overflow
        series = LOG2E * e * (1.0 - e * (0.5 - e * (1.0 / 3.0)))
        return select_(e < 2.0**-7, series, select_(y > 24.0, y, ptx.lg2(e + 1.0)))

    def gate_values(self, x):
        """The gate of this thread's two channels and 16 rows, from its boxes in kg's (and kF's) tile."""
        of_tile = self.K // 64
        if self.g_words == 1:
            at = x.gate_at + (x.channel // 64) * TILE + (x.lane << 2)
        else:
            box = x.channel // 32
            at = x.q + select_(box < of_tile, Int32(2 * SLOTS * self.keys), Int32(SLOTS * self.keys))
            at = at + (box % of_tile) * TILE + ((x.lane & 15) << 3)
        at = at + x.blk * (BLOCK * ROW)
        if self.g_words == 2:
            return [ptx.lds_vec(at, 2, i * ROW, Float32) for i in range(BLOCK)]
        return [ptx.unpack(ptx.lds(at, i * ROW), self.pair) for i in range(BLOCK)]

    def cumulate(self, x):
        """Inclusive cumsum over the block's 16 rows for both channels. Rows past T, zeros here, count as no decay."""
        sums, total = [], [Float32(0.0)] * 2
        for i, values in enumerate(self.gate_values(x)):
            if self.gate == "log":
                factor, unit = LOG2E, values
            else:
                factor = select_(x.live > i, x.coefficients[2], Float32(0.0))
                unit = [self.unit_decay(values[j], x.coefficients, j) for j in range(2)]
            if self.gate == "safe" or not self.dyadic:
                total = [ptx.fma(unit[j], factor, total[j]) for j in range(2)]
            else:
                step = [unit[j] * factor for j in range(2)]
                total = [total[j] + select_(step[j] < FLOOR, Float32(FLOOR), step[j]) for j in range(2)]
            sums.append(total)
        return sums

    def beta_value(self, word: Int32) -> Float32:
        """beta, of itself or its logit as loaded."""
        value = word.bitcast(Float32) if self.beta_wide else ptx.unpack(word, self.pair)[0]
        return ptx.rcp(ptx.ex2(value * (-LOG2E)) + 1.0) if self.beta_sigmoid else value

    def store_beta(self, x, word: Int32) -> None:
        value = select_(x.valid > x.row, self.beta_value(word), Float32(0.0))
        ptx.sts_if(x.row, -1, x.beta + x.row * 4, value)

    def row_products(self, x) -> None:
        """1 / norm of each row of q and k, and q_i . k_i of the raw rows (exact products, so that Aqk's diagonal bears
        no rounding of its operands): diagonals of x y^T. Block x.warp % 4."""
        lane, block = ptx.fresh(x.lane), x.warp & 3
        at16 = swizzled(lane)
        rows = x.raw + (block * BLOCK + (lane & 15)) * ROW
        row, chunk = keys_of(lane)
        keys, chunk = x.raw + (block * BLOCK + row) * ROW, (chunk ^ (row & 7)) << 4
        wanted = ([(0, 0), (1, 1)] if self.l2norm else []) + [(0, 1)]
        acc = [[[Float32(0.0)] * 4 for _ in range(2)] for _ in wanted]
        for kk in range(self.K // 16):
            off = [side * self.keys + (kk // 4) * TILE for side in range(2)]
            places = rows + at16[kk % 4], keys + (chunk ^ ((kk % 4) << 5))
            a, b = ([ptx.ldmatrix(at, o) for o in off] for at in places)
            for n, (left, right) in enumerate(wanted):
                for h in range(2):
                    acc[n][h] = ptx.mma(acc[n][h], a[left], b[right][2 * h : 2 * h + 2], self.pair)
        for n, (left, right) in enumerate(wanted):
            if left == right:
                out = x.norms + left * (CHUNK * 4) + block * (BLOCK * 4)
                self.put_trace(x, acc[n], out, lambda square: ptx.rsqrt(square + 1e-6))
            else:
                self.put_trace(x, acc[n], x.dots + block * (BLOCK * 4), lambda v: v)

    def put_trace(self, x, acc, out: Int32, of) -> None:
        """of(c_ii) of a 16 x 16 accumulator, 16 floats at `out`."""
        mine = select_((x.lane & 3) == (x.lane >> 3), Int32(1), Int32(0))
        for h in range(2):
            value = select_(((x.lane >> 2) & 1) == 1, acc[h][2 * h + 1], acc[h][2 * h])
            ptx.sts_if(mine, 0, out + (x.lane >> 2) * 4, of(value), 32 * h)

    # ---- A2: decayed operands ----------------------------------------------------------------------------------------

    def operands(self, x) -> None:
        """qF, kF, kg and the decay to the slot, kD (or kE) to its tile, the powers of two to `scales`."""
        pair, blk = self.pair, x.blk
        totals = [ptx.lds_vec(x.totals + x.channel * 4, 2, n * self.K * 4, Float32) for n in range(4)]
        before = [[Float32(0.0)] * 2]  # P_0 .. P_4
        for n in range(4):
            before.append([before[n][j] + totals[n][j] for j in range(2)])
        whole = before[4]
        for j in range(2):
            ptx.sts_if(blk, 2, x.decay + x.channel * 4, ptx.ex2(whole[j]), 4 * j)
        anchors = [[Float32(0.0)] * 2] + [[ptx.ceil(p[j]) for j in range(2)] for p in before[1:]]
        mine, anchor, following = (
            [pick(blk, [v[j] for v in values]) for j in range(2)] for values in (before[:4], anchors[:4], anchors[1:])
        )
        self.store_scales(x, anchors, anchor)
        if self.dyadic:
            shift = [following[j] - mine[j] for j in range(2)]
            tail = [[ptx.ex2(whole[j] - following[j]) for j in range(2)]]
        else:
            shift = None  # of the same magnitude as rise
            steps = (anchor, following), (following, whole)
            tail = [[ptx.ex2(to[j] - at[j]) for j in range(2)] for at, to in steps]
        rise = [mine[j] - anchor[j] for j in range(2)]

        corner = (x.channel // 64) * TILE + blk * (BLOCK * ROW) + ((x.lane >> 2) << 4) + (x.lane & 3) * 4
        to_k, to_kd = SLOTS * self.keys, 2 * self.keys
        norms = later = self.norms_of(x, blk * BLOCK)
        ahead = [self.row_words(x.raw, corner, i) for i in range(2)]
        for i in range(BLOCK):
            total, off, place = x.sums[i], i * ROW, corner ^ ((i & 7) << 4)
            if i % 4 == 0:
                norms = later
            q, k = (ptx.unpack(word, pair) for word in ahead.pop(0))
            if self.l2norm:
                q, k = ([v * norm[i % 4] for v in side] for side, norm in zip((q, k), norms))
            level = [total[j] + rise[j] for j in range(2)]
            fall = [ptx.ex2(level[j]) for j in range(2)]
            grown = [k[j] * ptx.ex2(shift[j] - total[j] if self.dyadic else -level[j]) for j in range(2)]
            decayed = [ptx.pack(side[0] * fall[0], side[1] * fall[1], pair) for side in (q, k)]
            stored = grown
            for factor in tail:
                stored = [stored[j] * factor[j] for j in range(2)]
            # No load passes a store that stands before it, so that rows are asked for two ahead.
            if i + 2 < BLOCK:
                ahead.append(self.row_words(x.raw, corner, i + 2))
                if i % 4 == 2:
                    later = self.norms_of(x, blk * BLOCK + i + 2)
            there = x.q + place
            ptx.sts(there, decayed[0], off)
            ptx.sts(there, decayed[1], to_k + off)
            ptx.sts(x.raw + place, ptx.pack(grown[0], grown[1], pair), to_kd + off)
            ptx.sts(there, ptx.pack(stored[0], stored[1], pair), 2 * to_k + off)

    def row_words(self, raw: Int32, corner: Int32, i: int) -> list[Int32]:
        """The thread's word of row i of q and of k."""
        return [ptx.lds(raw + (corner ^ ((i & 7) << 4)), side * self.keys + i * ROW) for side in range(2)]

    def norms_of(self, x, row: Int32):
        """1 / norm of q and of k in four rows from `row` (a multiple of 4)."""
        if not self.l2norm:
            return None
        return [ptx.lds_vec(x.norms + row * 4, 4, side * CHUNK * 4, Float32) for side in range(2)]

    def store_scales(self, x, anchors, anchor) -> None:
        """Rows 0-3 of `scales`: 2^N_b; row p of 4-9: what takes the keys of PAIRS[p] to the anchor of its queries. Each
        thread writes what its block number says, for its two channels."""
        skip = 1 if self.dyadic else 0  # kE stands at the anchor of the block that follows
        at = x.scales + x.channel * 2
        power = ptx.pack(*(ptx.ex2_full(anchor[j]) for j in range(2)), self.pair)
        ptx.sts(at + x.blk * (self.K * 2), power)
        for first, n in ((4, 4), (8, 2)):
            steps = [[anchors[a][j] - anchors[b + skip][j] for j in range(2)] for a, b in PAIRS[first : first + n]]
            step = [pick(x.blk, [s[j] for s in steps]) for j in range(2)]
            value = ptx.pack(*(ptx.ex2_full(step[j]) for j in range(2)), self.pair)
            ptx.sts_if(n - x.blk, 0, at + (first + x.blk) * (self.K * 2), value)
