"""Who prepares which chunk, and how a chunk that another CTA prepared arrives.

Of a row (batch, value head) its own CTA prepares the first `lead` chunks, while the helpers get ahead; then it prepares `own`
and the helpers the `run` that follow, in turn. With own = 0, the lead at least 1, the row goes at SCAN's pace. A CTA's n-th job:

    own     the n-th chunk of its row that is no helper's
    helper  task bid + helpers * n, tasks in the order of chunks, rows side by side: all rows need their first ones first

Without helpers every chunk is its own CTA's. Helpers have the lowest block numbers and wait for nobody, so that they run
whenever anyone waits for them. A chunk's operands travel as they lie in a slot, by bulk copies through L2.
"""

from __future__ import annotations

from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, select_

from . import ptx
from .tiles import SLOTS


class Helpers:
    """Jobs, and the role SHIP of a helper: SCAN's first warp there."""

    receives, tells = True, False

    def plan_of(self, bid, turns, size, walks: cute.Tensor) -> SimpleNamespace:
        """A CTA's work. turns: the schedule; size: the problem's numbers."""
        helpers, own, run, lead = turns
        rows = size.B * size.HV  # of chunks: batches x value heads
        main = cutlass.max(bid - helpers, 0)
        row = main // size.n_v
        own, lead = select_(helpers > 0, own, Int32(1 << 30)), select_(helpers > 0, lead, Int32(0))
        rounds, rest = helpers // rows, helpers % rows
        helps = bid < helpers
        steps = (rounds + rounds // run * own, 1), (rounds % run, 1), (rest // size.HV, 0), (rest % size.HV, 0)
        return SimpleNamespace(
            **vars(size), helps=helps, roams=helps, bid=bid, helpers=helpers, own=own, run=run, lead=lead, rows=rows,
            row=row, u=main % size.n_v, b=row // size.HV, hv=row % size.HV, group=select_(helps, run, own), others=select_(helps, own, run),
            step=tuple(select_(helps, *step) for step in ((theirs, Int32(mine)) for theirs, mine in steps)),
        )  # fmt: skip

    def ctas(self, shares: Int32, helpers: Int32, strips: Int32) -> Int32:
        """Of the grid. strips: rows times the tiles of V that a CTA walks."""
        return helpers + strips

    def row_piece(self, plan) -> SimpleNamespace:
        """What SCAN walks: chunks first to stop - 1 of batch b, value head hv and V tile u, with output from `out` on, the
        CTA's own from the n-th on."""
        return SimpleNamespace(n=Int32(0), b=plan.b, hv=plan.hv, u=plan.u, first=Int32(0), out=Int32(0), stop=plan.chunks,
                               chunks=plan.chunks)  # fmt: skip

    @cute.jit
    def wanted(self, told):
        """Whether the kernel of even shares, if there was one, left the work to this one: a cut was open, or what it dropped
        would be seen (shares.py)."""
        wanted = (cute.size(told.walks) == 0) | (self.count_open(told.walks) > 0)
        if not wanted:
            wanted = self.count_seen(told.dropped, told.least) > 0
        return wanted

    def jobs(self, plan) -> Int32:
        """How many this CTA has."""
        after, period = plan.chunks - plan.lead, plan.own + plan.run
        theirs = after // period * plan.run + cutlass.max(after % period - plan.own, 0)  # of a row
        tasks = theirs * plan.rows
        mine = (tasks - plan.bid + plan.helpers - 1) // cutlass.max(plan.helpers, 1)
        return select_(plan.helps, mine, plan.chunks - theirs)

    def first_job(self, plan) -> SimpleNamespace:
        """chunk c of batch b and value head hv; u: its place among the chunks of its own kind that stand together (`lead`
        of them negative)."""
        row, turn = select_(plan.helps, plan.bid % plan.rows, plan.row), plan.bid // plan.rows
        c = select_(plan.helps, plan.lead + plan.own + turn + turn // plan.run * plan.own, Int32(0))
        return SimpleNamespace(c=c, b=row // plan.HV, hv=row % plan.HV, u=select_(plan.helps, turn % plan.run, -plan.lead))

    def next_job(self, plan, job) -> SimpleNamespace:
        """plan.step = (chunks, places, batches, heads) on: without a division, which would cost as much as a phase. Of a
        row (1, 1, 0, 0). What stands between two chunks of a kind is a group of the other kind."""
        chunks, places, batches, heads = plan.step
        hv = job.hv + heads
        over = hv >= plan.HV
        b = job.b + batches + select_(over, Int32(1), Int32(0))
        round = b >= plan.B
        carry = select_(round, Int32(1), Int32(0))
        u = job.u + places + carry
        last = u >= plan.group
        return SimpleNamespace(
            c=job.c + chunks + carry + select_(last, plan.others, Int32(0)), u=u - select_(last, plan.group, Int32(0)),
            b=b - select_(round, plan.B, Int32(0)), hv=hv - select_(over, plan.HV, Int32(0)),
        )  # fmt: skip

    def place_of(self, plan, job, n: Int32):
        """Slot and phase of the ring of a CTA's n-th job."""
        turn = select_(plan.helps, n, job.c)
        return turn % SLOTS, (turn // SLOTS) & 1

    @cute.jit
    def ship(self, at, bars, warp: Int32):
        """Each job's operands out, once ready."""
        plan = at.plan
        if warp == 0:
            with cute.arch.elect_one():
                for n in cutlass.range(self.jobs(plan), unroll=1):
                    slot, phase = n % SLOTS, (n // SLOTS) & 1
                    task = plan.bid + plan.helpers * n
                    to, flag = plan.shipped + Int64(task) * self.shipment, plan.arrived + Int64(task) * 4
                    cute.arch.mbarrier_wait(bars.ready + slot, phase)
                    done = 0
                    for name, size in self.cargo:
                        ptx.copy_out(to + done, at.address[name] + slot * size, size)
                        done += size
                    cute.arch.cp_async_bulk_commit_group()
                    cute.arch.cp_async_bulk_wait_group(0, read=False)
                    ptx.store_release(flag, Int32(1))
                    cute.arch.mbarrier_arrive(bars.free + slot)

    @cute.jit
    def receive(self, x, first: Int32, end: Int32):
        """Chunks first to end - 1, a run of the helpers', into their slots. Every thread of PREP waits until a slot is free,
        so that none arrives for a chunk before all have for the one two before it; the last warp's first lane loads."""
        plan = x.plan
        receiver = x.tid == self.threads_prep - 32
        task = (first - plan.lead) // (plan.own + plan.run) * plan.run * plan.rows + plan.row
        for c in cutlass.range(first, end, unroll=1):
            slot, phase = c % SLOTS, (c // SLOTS) & 1
            ready = x.bars.ready + slot
            if receiver:
                self.await_shipment(plan.arrived + Int64(task) * 4)
            cute.arch.mbarrier_wait(x.bars.free + slot, phase ^ 1)
            if receiver:
                cute.arch.mbarrier_arrive_and_expect_tx(ready, self.shipment)
                source, done = plan.shipped + Int64(task) * self.shipment, 0
                for name, size in self.cargo:
                    ptx.copy_in(getattr(x, name) + slot * size, source + done, size, ready.toint())
                    done += size
            else:
                cute.arch.mbarrier_arrive(ready)
            task += plan.rows

    @cute.jit
    def await_shipment(self, flag: Int64):
        there = ptx.load_acquire(flag)
        while there == 0:
            there = ptx.load_acquire(flag)
        cute.arch.fence_proxy("async")
