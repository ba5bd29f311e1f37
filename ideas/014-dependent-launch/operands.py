"""Phases A1 and A2 of the preparation kernel: gate and cumsum, row norms, beta, decayed operands (prep.py)."""

from __future__ import annotations

import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, select_

from . import ptx
from .tiles import BLOCK, CHUNK, PAIRS, ROW, TILE, pick, swizzled

LOG2E = math.log2(math.e)
FLOOR = -256.0  # log2 decay of one token below which it is 0 anyway; keeps differences of sums exact


class Operands:
    """Phases A1 and A2 of KdaPrep."""

    def gate_coefficients(self, x, a_log, dt_bias, hv, lower_bound):
        """Per channel (slope, offset) of the exponent, and the factor of what the gate function returns."""
        if self.gate == "log":
            return None
        a = ptx.ex2(a_log[hv] * LOG2E)
        bias = [Float32(0.0)] * 2
        if self.dt_bias:
            bias = [dt_bias[hv * self.K + x.channel + j] for j in range(2)]
        if self.gate == "safe":
            slope = a * (-LOG2E)
            return slope, [slope * bias[j] for j in range(2)], lower_bound * LOG2E
        return Float32(LOG2E), [bias[j] * LOG2E for j in range(2)], -a

    def log2_decay(self, value: Float32, coefficients, j: int) -> Float32:
        """Log2 decay of one token and channel from the gate's value."""
        if self.gate == "log":
            out = value * LOG2E
        else:
            slope, offset, factor = coefficients
            y = ptx.fma(value, slope, offset[j])
            e = ptx.ex2(y)
            if self.gate == "safe":
                return factor * ptx.rcp(e + 1.0)
            # log2(1 + e): its series where 1 + e would lose digits, y itself where e would overflow
            series = LOG2E * e * (1.0 - e * (0.5 - e * (1.0 / 3.0)))
            out = factor * select_(e < 2.0**-7, series, select_(y > 24.0, y, ptx.lg2(e + 1.0)))
        if self.dyadic:
            out = select_(out < FLOOR, Float32(FLOOR), out)
        return out

    def fetch_gate(self, x, address):
        """The gate's words of this thread's two channels and 16 rows, zeros past T."""
        raw = []
        for i in range(BLOCK):
            raw.append(ptx.ldg_if(x.live, i, address, self.g_words))
            address = address + x.stride * (2 * self.g_words)
        return raw

    def cumulate(self, x, raw, coefficients):
        """Inclusive cumsum over the block's 16 rows for both channels, and each row's largest decay (Fade.peak); rows
        past T count as no decay."""
        sums, total, peaks = [], [Float32(0.0)] * 2, Int32(0)
        for i in range(BLOCK):
            values = [r.bitcast(Float32) for r in raw[i]] if self.g_words == 2 else ptx.unpack(raw[i][0], self.pair)
            step = [self.log2_decay(values[j], coefficients, j) for j in range(2)]
            if self.fades:
                peaks = self.peak(x, i, step, peaks)
            total = [total[j] + select_(x.live > i, step[j], Float32(0.0)) for j in range(2)]
            sums.append(total)
        return sums, peaks

    @cute.jit
    def load_beta(self, x, beta: cute.Tensor, token: Int64, HV: Int32, hv: Int32):
        if x.tid < CHUNK:
            value = Float32(0.0)
            if x.tid < x.valid:
                flat = cute.make_tensor(beta.iterator + ((token + x.tid) * HV + hv), cute.make_layout(1))
                value = flat[0].to(Float32)
                if cutlass.const_expr(self.beta_sigmoid):
                    value = ptx.rcp(ptx.ex2(value * (-LOG2E)) + 1.0)
            ptx.sts(x.beta + x.tid * 4, value)

    def row_norms(self, x) -> None:
        """1 / norm of each row of q and k: diagonals of x x^T, whose B fragments are its A fragments."""
        lane = ptx.fresh(x.lane)
        at16 = swizzled(lane)
        for n in range(8 // self.warps):
            block = x.warp & 3
            of_k = (x.warp >> 2) if self.warps == 8 else Int32(n)
            tile = x.q + of_k * (x.k - x.q) + (block * BLOCK + (lane & 15)) * ROW
            acc = [[Float32(0.0)] * 4 for _ in range(2)]
            for kk in range(self.K // 16):
                a = ptx.ldmatrix(tile + at16[kk % 4], (kk // 4) * TILE)
                for h in range(2):
                    acc[h] = ptx.mma(acc[h], a, (a[h], a[h + 2]), self.pair)
            out = x.norms + of_k * (CHUNK * 4) + block * (BLOCK * 4)
            self.put_trace(x, acc, out, lambda square: ptx.rsqrt(square + 1e-6))

    def row_dots(self, x) -> None:
        """q_i . k_i of the raw rows: exact products, so that Aqk's diagonal bears no rounding of its operands."""
        lane = ptx.fresh(x.lane)
        at16 = swizzled(lane)
        rows = (x.warp * BLOCK + (lane & 15)) * ROW
        acc = [[Float32(0.0)] * 4 for _ in range(2)]
        for kk in range(self.K // 16):
            a, b = (ptx.ldmatrix(tile + rows + at16[kk % 4], (kk // 4) * TILE) for tile in (x.q, x.k))
            for h in range(2):
                acc[h] = ptx.mma(acc[h], a, (b[h], b[h + 2]), self.pair)
        self.put_trace(x, acc, x.dots + x.warp * (BLOCK * 4), lambda v: v)

    def put_trace(self, x, acc, out: Int32, of) -> None:
        """of(c_ii) of a 16 x 16 accumulator, 16 floats at `out`."""
        mine = select_((x.lane & 3) == (x.lane >> 3), Int32(1), Int32(0))
        for h in range(2):
            value = select_(((x.lane >> 2) & 1) == 1, acc[h][2 * h + 1], acc[h][2 * h])
            ptx.sts_if(mine, 0, out + (x.lane >> 2) * 4, of(value), 32 * h)

    def norm_of(self, x, of_k: int, row: Int32):
        """Four consecutive factors from `row` (a multiple of 4)."""
        return ptx.lds_vec(x.norms + row * 4, 4, of_k * CHUNK * 4, Float32)

    # ---- A2: decayed operands ----------------------------------------------------------------------------------------

    def operands(self, x, qg: cute.Tensor, kg: cute.Tensor) -> None:
        """qF over q, kF over k, kD (or kE) to its tile, qg and kg to global memory, the powers of two to `scales`."""
        pair, blk = self.pair, x.blk
        totals = [ptx.lds_vec(x.totals + x.channel * 4, 2, n * self.K * 4, Float32) for n in range(4)]
        before = [[Float32(0.0)] * 2]  # P_0 .. P_4
        for n in range(4):
            before.append([before[n][j] + totals[n][j] for j in range(2)])
        x.decay = before[4]
        anchors = [[Float32(0.0)] * 2] + [[ptx.ceil(p[j]) for j in range(2)] for p in before[1:]]
        mine, anchor, following = (
            [pick(blk, [v[j] for v in values]) for j in range(2)] for values in (before[:4], anchors[:4], anchors[1:])
        )
        power = self.store_scales(x, anchors, anchor)
        if self.dyadic:
            shift = [following[j] - mine[j] for j in range(2)]
            tail = [[ptx.ex2(x.decay[j] - following[j]) for j in range(2)]]
        else:
            shift = [anchor[j] - mine[j] for j in range(2)]
            steps = (anchor, following), (following, x.decay)
            tail = [[ptx.ex2(to[j] - at[j]) for j in range(2)] for at, to in steps]
        rise = [mine[j] - anchor[j] for j in range(2)]

        base = x.q + (x.channel // 64) * TILE + blk * (BLOCK * ROW) + (x.lane & 3) * 4
        out_q, out_k = (t.iterator.toint() + x.element * 2 for t in (qg, kg))
        to_k, to_kd = x.k - x.q, x.kd - x.q
        for i4 in range(0, BLOCK, 4):
            if self.l2norm:
                norm_q, norm_k = (self.norm_of(x, side, blk * BLOCK + i4) for side in range(2))
            for i in range(i4, i4 + 4):
                total = x.sums[i]
                here = base + ((x.lane >> 2) ^ (i & 7)) * 16
                q, k = ptx.unpack(ptx.lds(here, i * ROW), pair), ptx.unpack(ptx.lds(here + to_k, i * ROW), pair)
                if self.l2norm:
                    q, k = [v * norm_q[i - i4] for v in q], [v * norm_k[i - i4] for v in k]
                fall = [ptx.ex2(total[j] + rise[j]) for j in range(2)]
                grow = [ptx.ex2(shift[j] - total[j]) for j in range(2)]
                q_f = ptx.pack(q[0] * fall[0], q[1] * fall[1], pair)
                ptx.sts(here, q_f, i * ROW)
                ptx.sts(here + to_k, ptx.pack(k[0] * fall[0], k[1] * fall[1], pair), i * ROW)
                grown = [k[j] * grow[j] for j in range(2)]
                ptx.sts(here + to_kd, ptx.pack(grown[0], grown[1], pair), i * ROW)
                for factor in tail:
                    grown = [grown[j] * factor[j] for j in range(2)]
                ptx.stg_if(x.live, i, out_q, ptx.mul_pair(q_f, power, pair))
                ptx.stg_if(x.live, i, out_k, ptx.pack(grown[0], grown[1], pair))
                out_q, out_k = out_q + x.stride * 2, out_k + x.stride * 2

    def store_scales(self, x, anchors, anchor):
        """Rows 0-3 of `scales`: 2^N_b; row p of 4-9: what takes the keys of PAIRS[p] to the anchor of its queries. Each
        thread writes what its block number says, for its two channels; returns its own 2^N_b."""
        skip = 1 if self.dyadic else 0  # kE stands at the anchor of the block that follows
        at = x.scales + x.channel * 2
        power = ptx.pack(*(ptx.ex2_full(anchor[j]) for j in range(2)), self.pair)
        ptx.sts(at + x.blk * (self.K * 2), power)
        for first, n in ((4, 4), (8, 2)):
            steps = [[anchors[a][j] - anchors[b + skip][j] for j in range(2)] for a, b in PAIRS[first : first + n]]
            step = [pick(x.blk, [s[j] for s in steps]) for j in range(2)]
            value = ptx.pack(*(ptx.ex2_full(step[j]) for j in range(2)), self.pair)
            ptx.sts_if(n - x.blk, 0, at + (first + x.blk) * (self.K * 2), value)
        return power

    @cute.jit
    def store_decay(self, x, gl: cute.Tensor, element: Int64):
        flat = cute.make_tensor(gl.iterator + element, cute.make_layout(2))
        for j in cutlass.range_constexpr(2):
            flat[j] = x.decay[j]
