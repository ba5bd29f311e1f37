"""Who prepares which chunk, and how a chunk that another CTA prepared arrives.

Chunk c of a row (batch, value head) is a helper's where c >= lead and (c - lead) % period == period - 1, else its own
CTA's: while the rows walk their first `lead` chunks the helpers get ahead of them. A CTA's n-th job:

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

    def jobs(self, plan) -> Int32:
        """How many this CTA has."""
        theirs = (plan.chunks - plan.lead) // plan.period  # of a row
        tasks = theirs * plan.rows
        mine = (tasks - plan.bid + plan.helpers - 1) // cutlass.max(plan.helpers, 1)
        return select_(plan.helps, mine, plan.chunks - theirs)

    def first_job(self, plan) -> SimpleNamespace:
        """chunk c of batch b and value head hv; u: chunks since the last one that was a helper's, or since `lead`."""
        row = select_(plan.helps, plan.bid % plan.rows, plan.row)
        c = select_(plan.helps, plan.lead + (plan.bid // plan.rows + 1) * plan.period - 1, Int32(0))
        return SimpleNamespace(c=c, b=row // plan.HV, hv=row % plan.HV, u=-plan.lead)

    def next_job(self, plan, job) -> SimpleNamespace:
        """Of a helper, plan.step = (chunks, batches, heads) on: without a division, which would cost as much as a phase."""
        chunks, batches, heads = plan.step
        u = job.u + 1
        last = u == plan.period - 1
        own = job.c + select_(last, Int32(2), Int32(1))
        hv = job.hv + heads
        over = hv >= plan.HV
        b = job.b + batches + select_(over, Int32(1), Int32(0))
        round = b >= plan.B
        theirs = job.c + chunks + select_(round, plan.period, Int32(0))
        return SimpleNamespace(
            c=select_(plan.helps, theirs, own), u=select_(last, Int32(0), u), b=b - select_(round, plan.B, Int32(0)),
            hv=hv - select_(over, plan.HV, Int32(0)),
        )  # fmt: skip

    def place_of(self, plan, job, n: Int32):
        """Slot and phase of the ring of a CTA's n-th job."""
        turn = select_(plan.helps, n, job.c)
        return turn % SLOTS, (turn // SLOTS) & 1

    def shipment_of(self, plan, row: Int32, c: Int32):
        """Addresses of a shipped chunk's operands and of the word that says that they are there."""
        task = ((c - plan.lead) // plan.period) * plan.rows + row
        return plan.shipped + Int64(task) * self.shipment, plan.arrived + Int64(task) * 4

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
    def receive(self, x, c: Int32):
        """A helper's chunk c into its slot. Every thread of PREP arrives; the last warp's first lane loads."""
        slot, phase = c % SLOTS, (c // SLOTS) & 1
        ready = x.bars.ready + slot
        if x.tid == self.threads_prep - 32:
            source, flag = self.shipment_of(x.plan, x.plan.row, c)
            cute.arch.mbarrier_wait(x.bars.free + slot, phase ^ 1)
            there = ptx.load_acquire(flag)
            while there == 0:
                there = ptx.load_acquire(flag)
            cute.arch.fence_proxy("async")
            cute.arch.mbarrier_arrive_and_expect_tx(ready, self.shipment)
            done = 0
            for name, size in self.cargo:
                ptx.copy_in(getattr(x, name) + slot * size, source + done, size, ready.toint())
                done += size
        else:
            cute.arch.mbarrier_arrive(ready)
