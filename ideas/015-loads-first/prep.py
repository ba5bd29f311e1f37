"""The role PREP: one chunk after another from raw inputs to SCAN's operands (forward.py has the phases' table)."""

from __future__ import annotations

from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, select_

from . import ptx
from .dyadic import Dyadic
from .inverse import Inverse
from .operands import Operands
from .scores import Scores
from .tiles import BLOCK, CHUNK, SLOTS, TILE


class Prep(Operands, Dyadic, Scores, Inverse):
    """PREP of KdaForward."""

    @cute.jit
    def prepare(self, at, tma, bars, plan, tid: Int32, beta, a_log, dt_bias, gates: Int64, lower_bound):
        """at: shared addresses by name; tma: (atom, tensor[, smem]) of q, k and g, and the tiles that take the gate."""
        x = SimpleNamespace(
            **self.place(tid), **at, T=plan.T, plan=plan, bars=bars, beta_row=plan.HV * (4 if self.beta_wide else 2),
            logits=beta.iterator.toint(), a_log=a_log, dt_bias=dt_bias, lower_bound=lower_bound, gates=gates,
        )  # fmt: skip
        jobs = self.jobs(plan)
        job = self.first_job(plan)
        logit, coefficients = cute.make_rmem_tensor(1, Int32), cute.make_rmem_tensor(3, Float32)
        if jobs > 0:
            self.load_gate(x, tma, job, self.place_of(plan, job, Int32(0))[0])
            self.load_keys(x, tma, job)
            self.fetch_beta(x, job, logit)
            self.load_coefficients(x, job.hv, coefficients)
        c, b, hv, u, early = job.c, job.b, job.hv, job.u, Int32(0)  # early: whether the job's gate lies over kD
        for n in cutlass.range(jobs, unroll=1):
            c, b, hv, u, early = self.prepare_chunk(x, tma, logit, coefficients, n, n + 1 < jobs, c, b, hv, u, early)

    def place(self, tid: Int32) -> dict:
        """What of a chunk is this thread's. Each chunk asks anew: kept, it would take registers all the way.
        row: of beta, for the last 64 threads; negative for the others."""
        warp, lane = cute.arch.make_warp_uniform(tid // 32), tid % 32
        half, blk = warp % (self.K // 64), warp // (self.K // 64)
        return {"tid": tid, "warp": warp, "lane": lane, "blk": blk, "channel": half * 64 + 2 * lane,
                "row": tid - (self.threads_prep - CHUNK)}  # fmt: skip

    # The last warp loads.

    @cute.jit
    def load_keys(self, x, tma, job):
        if x.warp == self.warps - 1:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(x.bars.raw, 2 * self.keys)
            for atom, tensor, smem in (tma.q, tma.k):
                load = self.tma(atom, tensor, smem, (CHUNK, self.K), (None, 0, job.hv // x.plan.heads, job.b))
                cute.copy(load.atom, load.gmem[None, job.c], load.smem[None, 0], tma_bar_ptr=x.bars.raw)

    @cute.jit
    def load_gate(self, x, tma, job, slot: Int32):
        """The gate of a job's chunk, to where kg (and kF) will be; the slot is free."""
        if x.warp == self.warps - 1:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(x.bars.gate, self.g_words * self.keys)
            for i in cutlass.range_constexpr(self.g_words):
                load = self.gate_tiles(tma, tma.gates[i], job)
                for n in cutlass.range_constexpr(self.K // 64):
                    box = i * (self.K // 64) + n
                    cute.copy(load.atom, load.gmem[None, job.c, box], load.smem[None, n, slot], tma_bar_ptr=x.bars.gate)

    def gate_tiles(self, tma, smem, job):
        return self.tma(*tma.g, smem, (CHUNK, self.g_columns), (None, None, job.hv, job.b))

    @cute.jit
    def load_gate_early(self, x, tma, job):
        """The gate of a job whose slot is in use, over kD, which PREP has left."""
        if x.warp == self.warps - 1:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(x.bars.gate, self.keys)
            load = self.gate_tiles(tma, tma.early, job)
            for n in cutlass.range_constexpr(self.K // 64):
                cute.copy(load.atom, load.gmem[None, job.c, n], load.smem[None, n], tma_bar_ptr=x.bars.gate)

    @cute.jit
    def receive_run(self, x, tma, job, following, n: Int32, more, slot: Int32, phase: Int32):
        """The helpers' chunks between a job's and the following one's, or the end; and the gate of the latter, asked for
        before anything is waited for, unless it is too wide for kD's tile."""
        if cutlass.const_expr(self.g_words == 1):
            if more:
                if x.warp == self.warps - 1:
                    cute.arch.mbarrier_wait(x.bars.ready + slot, phase)
                self.load_gate_early(x, tma, following)
        self.receive(x, job.c + 1, select_(more, following.c, x.plan.chunks))
        if cutlass.const_expr(self.g_words == 2):
            if more:
                self.load_gate_when_free(x, tma, following, n + 1)

    @cute.jit
    def load_gate_when_free(self, x, tma, job, n: Int32):
        slot, phase = self.place_of(x.plan, job, n)
        if x.warp == self.warps - 1:
            cute.arch.mbarrier_wait(x.bars.free + slot, phase ^ 1)
        self.load_gate(x, tma, job, slot)

    @cute.jit
    def fetch_beta(self, x, job, out: cute.Tensor):
        """The logit of row x.row of the job's chunk, for the last two warps."""
        if x.warp >= self.warps - 2:
            load = ptx.ldg_if if self.beta_wide else ptx.ldg_half_if
            token = Int64(job.b) * x.T + (job.c * CHUNK + x.row)
            at = x.logits + token * x.beta_row + job.hv * (4 if self.beta_wide else 2)
            out[0] = load(x.T - job.c * CHUNK - x.row, 0, at)[0]

    def prefetch_gate(self, x, job, t: Int32) -> None:
        """The gate of a job's chunk to L2, by 128 threads (t): it will be fetched late, and waited for."""
        line, lines = t & 1, self.K * 2 * self.g_words // 128  # of a row
        row = job.c * CHUNK + (t >> 1)
        token = Int64(job.b) * x.T + cutlass.min(row, x.T - 1)
        at = x.gates + (token * x.plan.HV + job.hv) * (lines * 128)
        for i in range(0, lines, 2):
            ptx.prefetch(at + (line + i if lines > 1 else 0) * 128)

    def meet(self) -> None:
        """All of PREP."""
        cute.arch.barrier(barrier_id=1, number_of_threads=self.threads_prep)

    @cute.jit
    def prepare_chunk(self, x, tma, logit: cute.Tensor, coefficients: cute.Tensor, n: Int32, more, c: Int32, b: Int32,
                      hv: Int32, u: Int32, early: Int32):  # fmt: skip
        job = SimpleNamespace(c=c, b=b, hv=hv, u=u)
        following = self.next_job(x.plan, job)
        slot, phase = self.place_of(x.plan, job, n)
        at = vars(x)
        at = at | self.place(ptx.fresh(x.tid)) | {"inverse": x.inverse + slot * TILE, "aqk": x.aqk + slot * TILE}
        at |= {"decay": x.decay + slot * (self.K * 4), "beta": x.beta + slot * (CHUNK * 4)}
        whole = x
        x = SimpleNamespace(**at, q=x.qg + slot * self.keys, valid=x.T - job.c * CHUNK)
        x.live = x.valid - BLOCK * x.blk
        front, back = x.warp < 4, x.warp >= self.warps - 4  # of 4 warps all are both
        x.coefficients = self.gate_coefficients(x, coefficients)

        # -- A1 ------------------------------------------------------------------------------------------------------
        cute.arch.mbarrier_wait(x.bars.raw, n & 1)
        if back:
            self.row_products(x)
        cute.arch.mbarrier_wait(x.bars.gate, n & 1)
        x.gate_at = x.q + 2 * SLOTS * self.keys
        if cutlass.const_expr(self.g_words == 1):
            x.gate_at = select_(early == 1, x.kd, x.gate_at)
        x.sums = self.cumulate(x)
        ptx.sts_vec(x.totals + (x.blk * self.K + x.channel) * 4, x.sums[BLOCK - 1])
        cute.arch.mbarrier_wait(x.bars.free + slot, phase ^ 1)
        self.store_beta(x, logit[0])
        if more:
            self.fetch_beta(x, following, logit)
            if x.plan.roams:
                self.load_coefficients(x, following.hv, coefficients)
        if cutlass.const_expr(self.dyadic):
            x.local = [x.kd, x.q + 2 * SLOTS * self.keys]
            self.meet()  # E of the chunk before has read kD's tile, A1 the gate
            self.store_local(x)
        self.meet()
        if cutlass.const_expr(self.dyadic):
            self.put_diagonal(x, self.diagonal_scores(x))
            x.sums = self.load_local(x)
            self.meet()

        # -- A2 ------------------------------------------------------------------------------------------------------
        self.operands(x)
        self.meet()
        if more:
            self.load_keys(x, tma, following)

        # -- B -------------------------------------------------------------------------------------------------------
        pairs = [x.warp + self.warps * i for i in range(0 if self.dyadic else 8 // self.warps)]
        first = 4 if self.dyadic else 8
        strips = [x.warp + self.warps * i for i in range(4 * (10 - first) // self.warps)]
        scores = [self.pair_scores(x, p) for p in pairs]
        slices = [self.strip_scores(x, m, first) for m in strips]
        for part in cutlass.range_constexpr(2):
            for i in cutlass.range_constexpr(len(pairs)):
                self.put_pair(x, scores[i], pairs[i], part == 0)
            for i in cutlass.range_constexpr(len(strips)):
                self.put_strip(x, slices[i], strips[i], first, part == 0)
            self.meet()

        # -- D, E: the front warps; the others go on to the next chunk's A1 --------------------------------------
        adjacent = x.plan.roams or following.c == job.c + 1  # the next job has another slot
        if more and adjacent:
            self.load_gate_when_free(x, tma, following, n + 1)
        if back:
            if more and not adjacent:
                self.prefetch_gate(x, following, x.tid - (self.threads_prep - 128))
            self.scale_operands(x, x.tid - (self.threads_prep - 128))
        if front:
            self.invert_diagonal(x)
            cute.arch.barrier(barrier_id=2, number_of_threads=128)
            for column in cutlass.range_constexpr(3):
                if x.warp == column:
                    self.invert_column(x, column)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.mbarrier_arrive(x.bars.ready + slot)
        early = Int32(0)
        if cutlass.const_expr(self.receives):
            if not adjacent:
                self.receive_run(whole, tma, job, following, n, more, slot, phase)
                early = Int32(1)
        return following.c, following.b, following.hv, following.u, early
