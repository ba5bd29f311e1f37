"""SCAN on Blackwell: the roles RECUR and OUTPUT (equations, barriers and tensor memory: kda_sm100.py)."""

from __future__ import annotations

from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05

from . import ptx, tmem
from .tiles import CHUNK, INFINITE, ROW, SLOTS, TILE

GROUP = 128  # threads of RECUR, and of OUTPUT
H, B_R, V_NEW, R, V_ACC, DH, O = 0, 64, 96, 128, 192, 256, 384  # first columns in tensor memory
MEET_RECUR, MEET_OUTPUT, MEET_SCAN = 3, 4, 5  # named barriers


class ScanSm100:
    """SCAN of KdaForward."""

    # ---- products --------------------------------------------------------------------------------------------------

    def _mma(self, n: int, b_major: OperandMajorMode) -> cute.TiledMma:
        """v_tile x n x k16, A from tensor memory, B from shared memory, fp32 accumulator in tensor memory."""
        op = tcgen05.MmaF16BF16Op(
            self.io, Float32, (self.v_tile, n, 16), tcgen05.CtaGroup.ONE, tcgen05.OperandSource.TMEM,
            OperandMajorMode.K, b_major,
        )  # fmt: skip
        return cute.make_tiled_mma(cute.make_mma_atom(op))

    def products(self, s, columns: cute.Pointer) -> SimpleNamespace:
        """The five products as (MMA, accumulator, A, B) each. s: shared tensors by name; columns: tensor memory."""
        tokens, state = self._mma(CHUNK, OperandMajorMode.K), self._mma(self.K, OperandMajorMode.MN)

        def product(mma, out, n, a, k, b, stages=1):
            shape = mma.make_fragment_C(mma.partition_shape_C((self.v_tile, n))).layout
            acc = cute.make_tensor(columns + out, cute.append(shape, cute.make_layout(stages, stride=n)))
            shape = mma.make_fragment_A(mma.partition_shape_A((self.v_tile, k))).layout
            left = cute.make_tensor(cute.recast_ptr(columns + a, dtype=self.io), shape)
            return mma, acc, left, mma.make_fragment_B(mma.get_slice(0).partition_B(b))

        return SimpleNamespace(
            r=product(tokens, R, CHUNK, H, self.K, s.kf),
            v=product(tokens, V_ACC, CHUNK, B_R, CHUNK, s.inverse),
            dh=product(state, DH, self.K, V_NEW, CHUNK, s.kg),
            o_state=product(tokens, O, CHUNK, H, self.K, s.qg, stages=2),
            o_chunk=product(tokens, O, CHUNK, V_NEW, CHUNK, s.aqk, stages=2),
        )

    def multiply(self, product, slot: Int32, stage=0, fresh: bool = True) -> None:
        """Issue accumulator = (0 if fresh else accumulator) + A B of the ring's slot; the MMAs elect a lane."""
        mma, acc, a, b = product
        acc, atom = acc[None, None, None, stage], cute.make_mma_atom(mma.op)
        for k in range(cute.size(a, mode=[2])):
            atom.set(tcgen05.Field.ACCUMULATE, not fresh or k > 0)
            cute.gemm(atom, acc, a[None, None, k], b[None, None, k, slot], acc)

    def commit(self, bar) -> None:
        """Arrive on bar when every product issued so far is done."""
        with cute.arch.elect_one():
            tcgen05.commit(bar)

    def wait(self, bar, phase: Int32) -> None:
        """Wait for products, or for those who share tensor memory."""
        cute.arch.mbarrier_wait(bar, phase)
        tmem.after_sync()

    # ---- strips ----------------------------------------------------------------------------------------------------

    def place_scan(self, warp: Int32, tid: Int32, t: Int32, s_v) -> dict:
        """What of the accumulators is this thread's: its warp's 16-row strips, one for each 64 columns of V.
        t: tensor memory at the warp's lanes; group: which 64 columns the warp's rows are of; rows: V index of the
        thread's first value of each strip; values: where ldmatrix and stmatrix find them in v and o."""
        lane, quarter = tid % 32, warp % 4
        row = lane & 7
        first = [quarter * (16 * self.groups) + 16 * i for i in range(self.groups)]
        corner = s_v.iterator.toint() + (((lane >> 4) << 3) + row) * ROW
        chunks = [((v % 64) // 8 + ((lane >> 3) & 1)) ^ row for v in first]
        return {
            "t": t + (quarter << 21), "lane": lane, "warp": warp, "group": quarter * self.groups // 4,
            "rows": [v + (lane >> 2) for v in first],
            "values": [corner + (v // 64) * TILE + (chunk << 4) for v, chunk in zip(first, chunks)],
        }  # fmt: skip

    def pairs_of(self, x, base: Int32, n: int):
        """The fp32 factors of a strip's columns 8 n + 2 (q % 4) and the next."""
        return ptx.lds_vec(base + (x.lane & 3) * 8, 2, n * 32, Float32)

    # ---- RECUR -----------------------------------------------------------------------------------------------------

    @cute.jit
    def recur(self, x, bars, at, piece):
        """The state over a piece of a strip (Helpers.row_piece): from h0 or zero if its first chunk is the strip's, else from
        zero; to ht if its last is the strip's. The first warp issues every product. x: place and products. Returns
        what of it the CTA tells (Shares.note)."""
        strips = self.groups * (self.K // 64)
        r_h = cute.make_rmem_tensor(32 * strips, Float32)
        r_h.fill(0.0)
        v0 = piece.u * self.v_tile
        if cutlass.const_expr(self.has_h0):
            if piece.first == 0:
                for i in cutlass.range_constexpr(32 * strips):
                    k, v = self.element(x, i)
                    r_h[i] = at.h0[piece.b, piece.hv, k, v0 + v]
        slot, phase = piece.n % SLOTS, (piece.n // SLOTS) & 1
        dropped, least = Int32(0), Int32(INFINITE)
        for c in cutlass.range(piece.first, piece.stop, unroll=1):
            self.recur_chunk(x, bars, r_h, (piece.n + c - piece.first) & 1, slot, phase)
            slot, phase = self.advance(slot, phase)
            if cutlass.const_expr(self.tells):
                dropped, least = self.note(self.peak(r_h), c, piece, dropped, least)
        if piece.stop == piece.chunks:
            for i in cutlass.range_constexpr(32 * strips):
                k, v = self.element(x, i)
                at.ht[piece.b, piece.hv, k, v0 + v] = r_h[i]
        return dropped, least

    def peak(self, r_h: cute.Tensor) -> Int32:
        """The warp's largest |h|, rounded towards zero to bf16, as bits: their order is that of the magnitudes, infinities
        and NaN above all."""
        most = Int32(0)
        for i in range(cute.size(r_h)):
            most = cutlass.max(most, r_h[i].bitcast(Int32) & 0x7FFFFFFF)
        return ptx.redux_max(most >> 16)

    def element(self, x, i: int):
        """(k, v) of value i of the state, strips in the order (half of the warp's rows, 64 columns of K)."""
        strip, n, r, j = i // 32, i % 32 // 4, i // 2 % 2, i % 2
        half, tile = strip // (self.K // 64), strip % (self.K // 64)
        return tile * 64 + 8 * n + 2 * (x.lane & 3) + j, x.rows[half] + 8 * r

    @cute.jit
    def recur_chunk(self, x, bars, r_h: cute.Tensor, turn: Int32, slot: Int32, phase: Int32):
        """One chunk. r_h: the state before it, then the one after it."""
        self.put_state(x, r_h)
        cute.arch.mbarrier_wait(bars.ready + slot, phase)
        self.hand_over()
        if x.warp == 0:
            tmem.after_sync()
            self.multiply(x.p.r, slot)
            self.commit(bars.r_full)
            self.wait(bars.o_empty + slot, phase ^ 1)
            self.multiply(x.p.o_state, slot, slot)
        self.decay_state(x, r_h, slot)
        cute.arch.mbarrier_wait(bars.value + x.group * SLOTS + slot, phase)
        self.wait(bars.r_full, turn)
        self.put_r(x, slot)
        cute.arch.mbarrier_arrive(bars.free + slot)
        self.hand_over()
        if x.warp == 0:
            tmem.after_sync()
            self.multiply(x.p.v, slot)
            self.commit(bars.v_full)
        self.wait(bars.v_full, turn)
        self.put_v(x)
        self.hand_over()
        if x.warp == 0:
            tmem.after_sync()
            self.multiply(x.p.dh, slot)
            self.commit(bars.dh_full)
            self.multiply(x.p.o_chunk, slot, slot, fresh=False)
            self.commit(bars.o_full + slot)
        self.wait(bars.dh_full, turn)
        self.add_state(x, r_h)

    def hand_over(self) -> None:
        """What RECUR has read and written of tensor memory is done, for its first warp to issue the next product."""
        tmem.written()
        tmem.before_sync()
        cute.arch.barrier(barrier_id=MEET_RECUR, number_of_threads=GROUP)

    def decay_state(self, x, r_h: cute.Tensor, slot: Int32) -> None:
        tiles = self.K // 64
        for tile in range(tiles):
            for n in range(8):
                factor = self.pairs_of(x, x.decay + slot * (self.K * 4) + tile * 256, n)
                for half in range(self.groups):
                    for i in range(4):
                        at = 32 * (half * tiles + tile) + 4 * n + i
                        r_h[at] = r_h[at] * factor[i % 2]

    def put_r(self, x, slot: Int32) -> None:
        """-beta r = beta (R - v) as an operand."""
        beta, v = x.beta + slot * (CHUNK * 4), slot * (self.groups * TILE)
        for half in range(self.groups):
            values = [ptx.ldmatrix(x.values[half] + v, i * 16 * ROW, trans=True) for i in range(4)]
            acc = tmem.read(x.t + R + half * tmem.STRIP)
            words = []
            for n in range(8):
                factor = self.pairs_of(x, beta, n)
                for r in range(2):
                    v_pair = ptx.unpack(values[n // 2][2 * (n % 2) + r], self.pair)
                    out = [(acc[4 * n + 2 * r + j] - v_pair[j]) * factor[j] for j in range(2)]
                    words.append(ptx.pack(*out, self.pair))
            tmem.write(x.t + B_R + half * tmem.STRIP, words)

    def put_v(self, x) -> None:
        """v' as an operand."""
        for half in range(self.groups):
            acc = tmem.read(x.t + V_ACC + half * tmem.STRIP)
            words = [ptx.pack(acc[i], acc[i + 1], self.pair) for i in range(0, 32, 2)]
            tmem.write(x.t + V_NEW + half * tmem.STRIP, words)

    def strips_of_state(self):
        """(strip, offset of its accumulator, of its packed operand) in tensor memory."""
        tiles = self.K // 64
        return [(half * tiles + tile, half * tmem.STRIP + 64 * tile, half * tmem.STRIP + 32 * tile)
                for half in range(self.groups) for tile in range(tiles)]  # fmt: skip

    def add_state(self, x, r_h: cute.Tensor) -> None:
        for strip, at, _ in self.strips_of_state():
            acc = tmem.read(x.t + DH + at)
            for i in range(32):
                r_h[32 * strip + i] = r_h[32 * strip + i] + acc[i]

    def put_state(self, x, r_h: cute.Tensor) -> None:
        """h as an operand."""
        for strip, _, at in self.strips_of_state():
            words = [ptx.pack(r_h[32 * strip + i], r_h[32 * strip + i + 1], self.pair) for i in range(0, 32, 2)]
            tmem.write(x.t + H + at, words)

    # ---- OUTPUT ----------------------------------------------------------------------------------------------------

    @cute.jit
    def output(self, x, bars, v, o, scale: Float32, piece):
        """o of a piece from tensor memory over v in shared memory and, from chunk piece.out on, off; v of the next chunk. v, o:
        TMA, for each 64 columns."""
        slot, phase = piece.n % SLOTS, (piece.n // SLOTS) & 1
        self.load_values(x, bars, v, piece.first, slot)
        for c in cutlass.range(piece.first, piece.stop, unroll=1):
            if c + 1 < piece.stop:
                self.load_values(x, bars, v, c + 1, slot ^ 1)
            self.wait(bars.o_full + slot, phase)
            cute.arch.mbarrier_arrive(bars.free + slot)
            cute.arch.mbarrier_wait(bars.free + slot, phase)  # RECUR has read v
            self.put_output(x, slot, scale)
            cute.arch.fence_proxy("async.shared", space="cta")
            tmem.before_sync()
            cute.arch.mbarrier_arrive(bars.o_empty + slot)
            cute.arch.barrier(barrier_id=MEET_OUTPUT, number_of_threads=GROUP)
            if (x.warp == GROUP // 32) & (c >= piece.out):
                with cute.arch.elect_one():
                    for g in cutlass.range_constexpr(self.groups):
                        cute.copy(o[g].atom, o[g].smem[None, slot], o[g].gmem[None, c])
                    cute.arch.cp_async_bulk_commit_group()
            slot, phase = self.advance(slot, phase)

    @cute.jit
    def output_is_read(self, x):
        if x.warp == GROUP // 32:
            with cute.arch.elect_one():
                cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def load_values(self, x, bars, v, c: Int32, slot: Int32):
        """v of chunk c, once o of the chunk two before it has left the slot."""
        if x.warp == GROUP // 32:
            with cute.arch.elect_one():
                cute.arch.cp_async_bulk_wait_group(0, read=True)
            for g in cutlass.range_constexpr(self.groups):
                bar = bars.value + g * SLOTS + slot
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(bar, TILE)
                cute.copy(v[g].atom, v[g].gmem[None, c], v[g].smem[None, slot], tma_bar_ptr=bar)

    def put_output(self, x, slot: Int32, scale: Float32) -> None:
        for half in range(self.groups):
            acc = tmem.read(x.t + O + slot * CHUNK + half * tmem.STRIP)
            words = [ptx.pack(scale * acc[i], scale * acc[i + 1], self.pair) for i in range(0, 32, 2)]
            for i in range(4):
                at = x.values[half] + slot * (self.groups * TILE)
                ptx.stmatrix(at, words[4 * i : 4 * i + 4], i * 16 * ROW, trans=True)
