"""The role PREP: one chunk after another from raw inputs to SCAN's operands (kda_sm90.py has the phases' table)."""

from __future__ import annotations

from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from . import ptx
from .dyadic import Dyadic
from .inverse import Inverse
from .operands import Operands
from .scores import Scores
from .tiles import BLOCK, CHUNK, SLOTS, TILE


class Prep(Operands, Dyadic, Scores, Inverse):
    """PREP of KdaForward."""

    @cute.jit
    def prepare(self, at, q, k, bars, chunks: Int32, tid: Int32, g, beta, a_log, dt_bias, b: Int32, hv: Int32,
                lower_bound):  # fmt: skip
        """at: shared addresses by name; q, k: TMA loads, one column a chunk."""
        K = self.K
        T, HV = g.shape[1], g.shape[2]
        x = SimpleNamespace(**self.place(tid), T=T, chunks=chunks, bars=bars, **at)
        x.row_bytes = HV * (K * 2 * self.g_words)  # of g
        token = Int64(b) * T
        x.gate = g.iterator.toint() + (((token + BLOCK * x.blk) * HV + hv) * K + x.channel) * (2 * self.g_words)
        beta_bytes = 4 if self.beta_wide else 2
        x.beta_row = HV * beta_bytes
        x.logit = beta.iterator.toint() + ((token + tid) * HV + hv) * beta_bytes
        x.coefficients = self.gate_coefficients(x, a_log, dt_bias, hv, lower_bound)
        words = cute.make_rmem_tensor(BLOCK * self.g_words + 1, Int32)  # the gate's, and beta
        self.load_keys(x, q, k, Int32(0))
        self.fetch(x, words, Int32(0))
        slot, phase = Int32(0), Int32(0)
        for c in cutlass.range(chunks, unroll=1):
            self.prepare_chunk(x, q, k, words, c, slot, phase)
            slot, phase = self.advance(slot, phase)

    def place(self, tid: Int32) -> dict:
        """What of a chunk is this thread's. Each chunk asks anew: kept, it would take registers all the way."""
        warp, lane = cute.arch.make_warp_uniform(tid // 32), tid % 32
        half, blk = warp % (self.K // 64), warp // (self.K // 64)
        return {"tid": tid, "warp": warp, "lane": lane, "blk": blk, "channel": half * 64 + 2 * lane}

    @cute.jit
    def load_keys(self, x, q, k, c: Int32):
        if x.warp == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(x.bars.raw, 2 * self.keys)
            cute.copy(q.atom, q.gmem[None, c], q.smem[None, 0], tma_bar_ptr=x.bars.raw)
            cute.copy(k.atom, k.gmem[None, c], k.smem[None, 0], tma_bar_ptr=x.bars.raw)

    def fetch(self, x, words: cute.Tensor, c: Int32) -> None:
        """The gate's words of chunk c for this thread's two channels and 16 rows, and its beta; zeros past T."""
        left = x.T - c * CHUNK
        base = x.gate + Int64(c * CHUNK) * x.row_bytes
        for i in range(BLOCK):
            got = ptx.ldg_if(left - BLOCK * x.blk, i, ptx.mad_wide(x.row_bytes, i, base), self.g_words)
            for n in range(self.g_words):
                words[self.g_words * i + n] = got[n]
        load = ptx.ldg_if if self.beta_wide else ptx.ldg_half_if
        address = x.logit + Int64(c * CHUNK) * x.beta_row
        words[BLOCK * self.g_words] = load(cutlass.min(left, CHUNK) - x.tid, 0, address)[0]

    def meet(self) -> None:
        """All of PREP."""
        cute.arch.barrier(barrier_id=1, number_of_threads=self.threads_prep)

    @cute.jit
    def prepare_chunk(self, x, q, k, words: cute.Tensor, c: Int32, slot: Int32, phase: Int32):
        at = vars(x)
        at = at | self.place(ptx.fresh(x.tid)) | {"inverse": x.inverse + slot * TILE, "aqk": x.aqk + slot * TILE}
        at |= {"decay": x.decay + slot * (self.K * 4), "beta": x.beta + slot * (CHUNK * 4)}
        x = SimpleNamespace(**at, q=x.qg + slot * self.keys)
        x.live = x.T - c * CHUNK - BLOCK * x.blk
        # -- A1 ------------------------------------------------------------------------------------------------------
        self.store_beta(x, words[BLOCK * self.g_words])
        x.sums = self.cumulate(x, words)
        ptx.sts_vec(x.totals + (x.blk * self.K + x.channel) * 4, x.sums[BLOCK - 1])
        if cutlass.const_expr(self.dyadic):
            x.local = [x.kd, x.q + 2 * SLOTS * self.keys]
            self.meet()  # E of the chunk before has read kD's tile
            cute.arch.mbarrier_wait(x.bars.free + slot, phase ^ 1)
            self.store_local(x)
        cute.arch.mbarrier_wait(x.bars.raw, c & 1)
        if cutlass.const_expr(self.l2norm):
            self.row_norms(x)
        if cutlass.const_expr(not self.dyadic):
            if x.warp < 4:
                self.row_dots(x)
        self.meet()
        if cutlass.const_expr(self.dyadic):
            scores = self.diagonal_scores(x)
            x.sums = self.load_local(x)
            self.meet()
        else:
            cute.arch.mbarrier_wait(x.bars.free + slot, phase ^ 1)

        # -- A2 ------------------------------------------------------------------------------------------------------
        self.operands(x)
        self.meet()
        if c + 1 < x.chunks:
            self.load_keys(x, q, k, c + 1)

        # -- B -------------------------------------------------------------------------------------------------------
        if cutlass.const_expr(not self.dyadic):
            scores = [self.pair_scores(x, x.warp + self.warps * n) for n in range(8 // self.warps)]
        first = 4 if self.dyadic else 8
        strips = [self.strip_scores(x, x.warp + self.warps * n, first) for n in range(4 * (10 - first) // self.warps)]
        self.meet()
        if cutlass.const_expr(self.dyadic):
            self.put_diagonal(x, scores)
        else:
            for n in cutlass.range_constexpr(8 // self.warps):
                self.put_pair(x, scores[n], x.warp + self.warps * n)
        for n in cutlass.range_constexpr(len(strips)):
            self.put_strip(x, strips[n], x.warp + self.warps * n, first)
        self.meet()

        # -- D -------------------------------------------------------------------------------------------------------
        if x.warp < 4:
            self.invert_diagonal(x)
        if x.warp >= self.warps - 4:
            self.scale_operands(x, x.tid - (self.threads_prep - 128))
        self.meet()

        # -- E -------------------------------------------------------------------------------------------------------
        for column in cutlass.range_constexpr(3):
            if x.warp == column:
                self.invert_column(x, column)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.mbarrier_arrive(x.bars.ready + slot)
        self.fetch(x, words, c + 1)
