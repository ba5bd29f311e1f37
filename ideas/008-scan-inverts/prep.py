"""The role PREP: one chunk after another from raw inputs to SCAN's operands (forward.py has the phases' table)."""

from __future__ import annotations

from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, select_

from . import ptx
from .dyadic import Dyadic
from .operands import Operands
from .scores import Scores
from .tiles import BLOCK, CHUNK, SLOTS, TILE


class Prep(Operands, Dyadic, Scores):
    """PREP of KdaForward."""

    @cute.jit
    def prepare(self, at, tma, bars, chunks: Int32, tid: Int32, beta, a_log, dt_bias, T: Int32, HV: Int32, b: Int32,
                hv: Int32, lower_bound):  # fmt: skip
        """at: shared addresses by name; tma: loads q, k, gates (one for each tile that takes boxes of the gate)."""
        x = SimpleNamespace(**self.place(tid), T=T, chunks=chunks, bars=bars, **at)
        beta_bytes = 4 if self.beta_wide else 2
        x.beta_row = HV * beta_bytes
        x.logit = beta.iterator.toint() + ((Int64(b) * T + x.row) * HV + hv) * beta_bytes
        x.coefficients = self.gate_coefficients(x, a_log, dt_bias, hv, lower_bound)
        logit = cute.make_rmem_tensor(1, Int32)
        self.load_gate(x, tma, Int32(0), Int32(0))
        self.load_keys(x, tma, Int32(0))
        logit[0] = self.fetch_beta(x, Int32(0))
        slot, phase = Int32(0), Int32(0)
        for c in cutlass.range(chunks, unroll=1):
            self.prepare_chunk(x, tma, logit, c, slot, phase)
            slot, phase = self.advance(slot, phase)

    def place(self, tid: Int32) -> dict:
        """What of a chunk is this thread's. Each chunk asks anew: kept, it would take registers all the way.
        row: of beta, for the last 64 threads; negative for the others."""
        warp, lane = cute.arch.make_warp_uniform(tid // 32), tid % 32
        half, blk = warp % (self.K // 64), warp // (self.K // 64)
        return {"tid": tid, "warp": warp, "lane": lane, "blk": blk, "channel": half * 64 + 2 * lane,
                "row": tid - (self.threads_prep - CHUNK)}  # fmt: skip

    # The last warp loads.

    @cute.jit
    def load_keys(self, x, tma, c: Int32):
        if x.warp == self.warps - 1:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(x.bars.raw, 2 * self.keys)
            for load in (tma.q, tma.k):
                cute.copy(load.atom, load.gmem[None, c], load.smem[None, 0], tma_bar_ptr=x.bars.raw)

    @cute.jit
    def load_gate(self, x, tma, c: Int32, slot: Int32):
        """The gate of chunk c, to where kg (and kF) will be; the slot is free."""
        if x.warp == self.warps - 1:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(x.bars.gate, self.g_words * self.keys)
            for i in cutlass.range_constexpr(self.g_words):
                for n in cutlass.range_constexpr(self.K // 64):
                    load, box = tma.gates[i], i * (self.K // 64) + n
                    cute.copy(load.atom, load.gmem[None, c, box], load.smem[None, n, slot], tma_bar_ptr=x.bars.gate)

    def fetch_beta(self, x, c: Int32) -> Int32:
        """The logit of row x.row of chunk c."""
        load = ptx.ldg_if if self.beta_wide else ptx.ldg_half_if
        mine = select_(x.row < 0, Int32(0), x.T - c * CHUNK - x.row)
        return load(mine, 0, x.logit + Int64(c * CHUNK) * x.beta_row)[0]

    def meet(self) -> None:
        """All of PREP."""
        cute.arch.barrier(barrier_id=1, number_of_threads=self.threads_prep)

    @cute.jit
    def prepare_chunk(self, x, tma, logit: cute.Tensor, c: Int32, slot: Int32, phase: Int32):
        at = vars(x)
        at = at | self.place(ptx.fresh(x.tid)) | {"inverse": x.inverse + slot * TILE, "aqk": x.aqk + slot * TILE}
        at |= {"decay": x.decay + slot * (self.K * 4), "beta": x.beta + slot * (CHUNK * 4)}
        x = SimpleNamespace(**at, q=x.qg + slot * self.keys, valid=x.T - c * CHUNK)
        x.live = x.valid - BLOCK * x.blk
        # -- A1 ------------------------------------------------------------------------------------------------------
        cute.arch.mbarrier_wait(x.bars.free + slot, phase ^ 1)
        self.store_beta(x, logit[0])
        logit[0] = self.fetch_beta(x, c + 1)
        cute.arch.mbarrier_wait(x.bars.raw, c & 1)
        self.row_products(x)
        cute.arch.mbarrier_wait(x.bars.gate, c & 1)
        x.sums = self.cumulate(x)
        ptx.sts_vec(x.totals + (x.blk * self.K + x.channel) * 4, x.sums[BLOCK - 1])
        if cutlass.const_expr(self.dyadic):
            x.local = [x.kd, x.q + 2 * SLOTS * self.keys]
            cute.arch.mbarrier_wait(x.bars.inverted, (c & 1) ^ 1)
            self.meet()  # all have read the gate
            self.store_local(x)
        self.meet()
        if cutlass.const_expr(self.dyadic):
            self.put_diagonal(x, self.diagonal_scores(x))
            x.sums = self.load_local(x)
            self.meet()

        # -- A2 ------------------------------------------------------------------------------------------------------
        if cutlass.const_expr(not self.dyadic):
            cute.arch.mbarrier_wait(x.bars.inverted, (c & 1) ^ 1)  # of the chunk before: kD's tile and the scales
        self.operands(x)
        self.meet()
        if c + 1 < x.chunks:
            self.load_keys(x, tma, c + 1)
            other, turn = self.advance(slot, phase)
            if x.warp == self.warps - 1:
                cute.arch.mbarrier_wait(x.bars.spent + other, turn ^ 1)
            self.load_gate(x, tma, c + 1, other)

        # -- B -------------------------------------------------------------------------------------------------------
        pairs = [x.warp + self.warps * n for n in range(0 if self.dyadic else 8 // self.warps)]
        first = 4 if self.dyadic else 8
        strips = [x.warp + self.warps * n for n in range(4 * (10 - first) // self.warps)]
        scores = [self.pair_scores(x, p) for p in pairs]
        slices = [self.strip_scores(x, m, first) for m in strips]
        for n in cutlass.range_constexpr(len(pairs)):
            self.put_pair(x, scores[n], pairs[n], True)
        for n in cutlass.range_constexpr(len(strips)):
            self.put_strip(x, slices[n], strips[n], first, True)
        self.meet()
        for n in cutlass.range_constexpr(len(pairs)):
            self.put_pair(x, scores[n], pairs[n], False)
        for n in cutlass.range_constexpr(len(strips)):
            self.put_strip(x, slices[n], strips[n], first, False)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.mbarrier_arrive(x.bars.ready + slot)
