"""The interface through which watchers (races, uninitialised reads, counters ...) see an execution. Every method may
be overridden.

`f` is the Fragment (lanes) that executes `ins`; machine.where(f) names kernel, CTA, warps, PTX line and source line.
Addresses are per lane; in space "shared" they are offsets within the CTA (machine.cta_of_lane[f.lanes] says which).
"""

from __future__ import annotations

import functools


class Watch:
    """Sees everything, does nothing. counts_warps: whether machine.by_warp is to be kept."""

    counts_warps = False

    def launch(self, machine):
        """A kernel is about to run; machine.memory holds the allocations that it may touch."""

    def batch_begin(self, machine, first_cta, ctas):
        """A batch of CTAs starts; its shared memory and registers are fresh."""

    def batch_end(self, machine):
        """All its warps have exited and no asynchronous operation is left."""

    def access(self, machine, f, ins, kind, space, address, nbytes):
        """Lanes of f read or write (kind) nbytes at `address` through the generic proxy."""

    def async_access(self, machine, op, kind, space, cta, address, nbytes, warp=None):
        """An asynchronous operation reads or writes pieces of nbytes at `address` (array), in shared, global or
        tensor memory. `cta` is the batch-local CTA index; `warp` the only one of op.warps that does. Registers of wgmma
        and tcgen05.ld/st are reported by issue and done alone."""

    def async_issue(self, machine, f, ins, op):
        """f issues the asynchronous operation `op`."""

    def async_done(self, machine, op):
        """`op` has been performed; it has signalled its mbarrier, if it has one."""

    def wait_done(self, machine, f, ins, what):
        """f passed a wait_group, wait::ld, wait::st ... instruction."""

    def barrier(self, machine, f, ins, action, ids, counts):
        """Warps of f arrive at CTA barriers `ids` (per warp); action sync or arrive."""

    def barrier_complete(self, machine, cta, barrier):
        """A CTA barrier is complete."""

    def mbarrier(self, machine, f, ins, event, cta, offset, detail):
        """An mbarrier at shared offset `offset` of CTA `cta`: event init, inval, arrive, expect_tx, complete_tx or
        passed (a wait that succeeded). f and ins are None for complete_tx and arrivals by asynchronous operations."""

    def warp_sync(self, machine, f, ins):
        """bar.warp.sync."""

    def fence(self, machine, f, ins, modifiers):
        """fence, membar, wgmma.fence or tcgen05.fence."""

    def cp_async_wait(self, machine, f, ins, allowed):
        """cp.async.wait_group or wait_all."""

    def turn(self, machine, f):
        """The scheduler lets `f` run, at machine.step, until it blocks, splits, exits or has used up its turn."""

    def wait_begin(self, machine, f, wait):
        """f is blocked (an engine.Wait)."""

    def wait_end(self, machine, f):
        """f, or a part of what was blocked, can go on."""


EVENTS = [name for name in vars(Watch) if not name.startswith("_") and name != "counts_warps"]


class Together(Watch):
    """Several watchers at once, each told of what it has a method for."""

    def __init__(self, *watchers):
        self.watchers = watchers
        self.counts_warps = any(w.counts_warps for w in watchers)
        for name in EVENTS:
            own = [getattr(w, name) for w in watchers if getattr(type(w), name) is not getattr(Watch, name)]
            setattr(self, name, own[0] if len(own) == 1 else functools.partial(_each, own))

    def report(self):
        """The findings of all."""
        return [text for w in self.watchers if hasattr(w, "report") for text in w.report()]


def _each(methods, *args):
    for method in methods:
        method(*args)
