"""A watcher that finds races and uninitialised reads in shared and tensor memory, by happens-before.

Vector clocks over agents: every warp of a CTA, and every stream of asynchronous operations (loads of one mbarrier, bulk
stores of a warp, wgmma of a warpgroup, tcgen05 mma of the CTA, tcgen05.ld and .st of a warp). Order comes from program
order, bar/barrier, mbarriers (arrivals and transactions release, a passed wait acquires), tcgen05.commit and the wait
instructions. Every agent keeps two clocks: what is ordered before it, and what is ordered before its asynchronous
operations; an ordinary store reaches the second only through fence.proxy.async (PTX ISA, "Proxies", "Asynchronous
operations"). The judgement does not depend on the order that the run happened to take, as long as it reaches the code.

Not judged: global memory, lanes of one warp against each other, operations of one stream among themselves, atomics, and
the tcgen05.fence forms. Granularity is 2 bytes of shared memory, one cell of tensor memory.
"""

from __future__ import annotations

import numpy as np

from .engine import ranges, source
from .memory import SHARED_WINDOW
from .ops.mbarrier import table
from .watch import Watch

AGENTS = 128
GRANULE = 2


class _Clock:
    """Two vector clocks: what is ordered before ordinary accesses, and before asynchronous operations."""

    def __init__(self, gen=None, asy=None):
        self.gen = np.zeros(AGENTS, np.int32) if gen is None else gen
        self.asy = np.zeros(AGENTS, np.int32) if asy is None else asy

    def join(self, other):
        np.maximum(self.gen, other.gen, out=self.gen)
        np.maximum(self.asy, other.asy, out=self.asy)

    def copy(self):
        return _Clock(self.gen.copy(), self.asy.copy())

    def set(self, agent, clock):
        self.gen[agent] = max(self.gen[agent], clock)
        self.asy[agent] = max(self.asy[agent], clock)


def _meet(clocks):
    """What is ordered before all of these."""
    clocks = list(clocks)
    if len(clocks) == 1:
        return clocks[0]
    return _Clock(np.min([c.gen for c in clocks], 0), np.min([c.asy for c in clocks], 0))


class _Shadow:
    """Last writer of every granule, and the last read by each agent."""

    def __init__(self, n):
        self.agent, self.clock = np.full(n, -1, np.int16), np.zeros(n, np.int32)
        self.generic, self.pc = np.zeros(n, bool), np.zeros(n, np.int32)
        self.reads = {}

    def reader(self, agent):
        if agent not in self.reads:
            self.reads[agent] = np.zeros((2, len(self.agent)), np.int32)
        return self.reads[agent]


class _Barrier:
    def __init__(self):
        self.pending, self.done, self.phase, self.waiting = _Clock(), _Clock(), 0, []
        self.init = None  # (agent, its clock, PTX index) of mbarrier.init


class _Cta:
    def __init__(self, machine, index):
        self.names = [f"warp {w}" for w in range(machine.warps_per_cta)]
        self.ids, self.issued = {}, {}
        self.latest = {}  # stream of bulk copies -> (warp, is it a store, PTX index) of its last one
        self.clocks = [_Clock() for _ in self.names]
        for w, c in enumerate(self.clocks):
            c.set(w, 1)
        self.barriers, self.mbarriers = {}, {}
        self.shared = _Shadow(-(-machine.shared_size // GRANULE))
        self.tensor = None

    def stream(self, key, name):
        """Agent number of a stream of asynchronous operations."""
        if key not in self.ids:
            self.ids[key] = len(self.names)
            self.names.append(name)
            if len(self.names) > AGENTS:
                raise RuntimeError(f"more than {AGENTS} warps and asynchronous streams in a CTA")
        return self.ids[key]


class Races(Watch):
    """findings: {(what, PTX index, earlier PTX index): message}; `report()` gives the messages, worst kind first."""

    def __init__(self):
        self.findings = {}
        self.lanes = None  # of an ordinary access: (lane numbers, granules of each)
        self.issuers = None  # of an asynchronous one: the warps that issued it

    def report(self):
        return list(self.findings.values())

    def batch_begin(self, machine, first_cta, ctas):
        self.m, self.ctas = machine, {}

    def cta(self, index):
        if index not in self.ctas:
            self.ctas[index] = _Cta(self.m, index)
        return self.ctas[index]

    def _warps(self, f):
        """[(cta index, cta, warp in CTA, its clock)] of a fragment."""
        out = []
        for w in f.warps.tolist():
            index, local = divmod(w, self.m.warps_per_cta)
            cta = self.cta(index)
            out.append((index, cta, local, cta.clocks[local]))
        return out

    # ---- accesses --------------------------------------------------------------------------------------------------

    def access(self, machine, f, ins, kind, space, address, nbytes):
        if space != "shared" or ins.parts[0] in ("atom", "red"):
            return
        first = (address & np.uint64(SHARED_WINDOW - 1)).astype(np.int64) // GRANULE
        cells = first[:, None] + np.arange(max(1, nbytes // GRANULE))
        of = f.lanes >> 5
        for index, cta, local, clock in self._warps(f):
            w = index * machine.warps_per_cta + local
            mine = np.unique(cells if len(f.warps) == 1 else cells[of == w])
            self.lanes = f.lanes[of == w] & 31, cells[of == w]
            self._check(index, cta, cta.shared, "shared", mine, kind, local, clock.gen[local], clock, True, f.pc)
        self.lanes = None

    def async_access(self, machine, op, kind, space, cta, address, nbytes, warp=None):
        if space == "global":
            return
        agent, number, clocks, clock = op.order
        if warp is not None:
            clock = clocks[int(warp)]
        state = self.cta(cta)
        if space == "shared":
            first = np.asarray(address).reshape(-1) // GRANULE
            cells = (first[:, None] + np.arange(max(1, nbytes // GRANULE))).reshape(-1)
            shadow = state.shared
        else:
            lane, column = address
            column = np.arange(column.start, column.stop) if isinstance(column, slice) else column
            cells = (lane[:, None] * 512 + column if np.ndim(lane) == 1 else lane * 512 + column).reshape(-1)
            state.tensor = shadow = state.tensor or _Shadow(128 * 512)
        self.issuers = np.unique(np.asarray(op.warps) % machine.warps_per_cta)
        self._check(cta, state, shadow, space, cells, kind, agent, number, clock, False, op.pc)
        self.issuers = None

    def _check(self, index, cta, shadow, space, cells, kind, agent, number, clock, generic, pc):
        """Compare one access with what is recorded of its granules, then record it."""
        writer, when = shadow.agent[cells], shadow.clock[cells]
        ordered = when <= clock.gen[writer]
        seen = ordered if generic else np.where(shadow.generic[cells], when <= clock.asy[writer], ordered)
        bad = (writer >= 0) & (writer != agent) & ~seen
        where = (index, cta, space, agent, pc)
        if bad.any():
            i = int(np.argmax(bad))
            what = f"{'write' if kind == 'write' else 'read'} after a write"
            if ordered[i]:
                what = f"asynchronous {kind} of what an ordinary store wrote, without fence.proxy.async in between"
            self._found(what, where, cells[i], int(writer[i]), int(shadow.pc[cells[i]]))
        if kind == "read":
            if (writer < 0).any():
                i = int(np.argmax(writer < 0))
                self._found("read of what nobody wrote", where, cells[i], None, None)
            mine = shadow.reader(agent)
            mine[0, cells], mine[1, cells] = number, pc
            return
        for other, (clocks, pcs) in shadow.reads.items():
            if other != agent:
                late = clocks[cells] > clock.gen[other]
                if late.any():
                    i = int(np.argmax(late))
                    self._found("write after a read", where, cells[i], other, int(pcs[cells[i]]))
        shadow.agent[cells], shadow.clock[cells] = agent, number
        shadow.generic[cells], shadow.pc[cells] = generic, pc

    def _place(self, pc):
        ins = self.m.kernel.code[pc]
        return f"PTX line {ins.line}: {ins.text[:90]}{source(ins)}"

    def _found(self, what, where, cell, other, earlier):
        index, cta, space, agent, pc = where
        if (what, pc, earlier) in self.findings:
            return
        place = (
            f"shared address 0x{cell * GRANULE:x}"
            if space == "shared"
            else f"tensor memory lane {cell // 512}, column {cell % 512}"
        )
        text = f"{what}: kernel {self.m.kernel.name}, CTA {self.m.cta_name(index)}, {place}: "
        text += cta.names[agent]
        if self.lanes is not None:
            lanes, cells = self.lanes
            text += f", lanes {ranges(np.unique(lanes[(cells == cell).any(1)]))}"
        if self.issuers is not None and " of warp " not in cta.names[agent]:
            text += f", issued by warp {ranges(self.issuers)}"
        text += f" at {self._place(pc)}"
        if other is not None:
            text += f"; not ordered after {cta.names[other]} at {self._place(earlier)}"
        self.findings[what, pc, earlier] = text

    # ---- order -----------------------------------------------------------------------------------------------------

    def async_issue(self, machine, f, ins, op):
        """Give the operation its stream, its number there, and the clocks of the warps that issue it: one, or for wgmma
        some of one warpgroup. What all of them read must be ordered before each of them."""
        kind = ins.parts[0] if ins.parts[0] != "tcgen05" else "tcgen05." + ins.parts[1]
        index, local = divmod(int(op.warps[0]), machine.warps_per_cta)
        cta, number = self.cta(index), None
        if kind == "cp" and op.mbar is not None:
            key, name = ("load", op.mbar), f"bulk loads of mbarrier 0x{op.mbar:x}"
        elif kind == "cp":
            key, name, number = ("store", local), f"bulk stores of warp {local}", max(op.group) + 1
        elif kind == "wgmma":
            key, name, number = ("wgmma", local // 4), f"wgmma of warpgroup {local // 4}", op.group + 1
        elif kind in ("tcgen05.ld", "tcgen05.st"):
            key, name = (kind, local), f"{kind} of warp {local}"
        else:
            key, name = ("tcgen05",), "tcgen05.mma"
        agent = cta.stream(key, name)
        cta.issued[agent] = number or cta.issued.get(agent, 0) + 1
        clocks = {int(w): cta.clocks[int(w) - index * machine.warps_per_cta].copy() for w in op.warps}
        for clock in clocks.values():
            clock.set(agent, cta.issued[agent])
        op.order, op.pc = (agent, cta.issued[agent], clocks, _meet(clocks.values())), f.pc
        if kind == "cp":
            cta.latest[agent] = local, op.mbar is None, f.pc

    def barrier(self, machine, f, ins, action, ids, counts):
        for (_, cta, local, clock), i in zip(self._warps(f), ids.tolist()):
            b = cta.barriers.setdefault(i, _Barrier())
            b.pending.join(clock)
            if action == "sync":
                b.waiting.append(clock)
            clock.gen[local] += 1

    def barrier_complete(self, machine, cta, barrier):
        b = self.cta(cta).barriers[barrier]
        for clock in b.waiting:
            clock.join(b.pending)
        b.pending, b.waiting = _Clock(), []

    def mbarrier(self, machine, f, ins, event, cta, offset, detail):
        state = self.cta(cta)
        b = state.mbarriers.setdefault(offset, _Barrier())
        if event == "init":
            b = state.mbarriers[offset] = _Barrier()
            _, _, local, clock = next(w for w in self._warps(f) if w[0] == cta)
            b.init = (local, int(clock.gen[local]), f.pc)
            return
        self._initialised(machine, f, cta, state, b, offset)
        if event == "passed":
            for index, _, _, clock in self._warps(f):
                if index == cta:
                    clock.join(b.done)
        elif event in ("arrive", "complete_tx"):
            if f is None:
                b.pending.join(machine.performing.order[3])
            else:
                for index, _, local, clock in self._warps(f):
                    if index == cta:
                        b.pending.join(clock)
            now = table(machine).get((cta, offset))
            if now is not None and now.phase != b.phase:
                b.phase, b.done = now.phase, b.pending.copy()
            if f is not None:
                for index, _, local, clock in self._warps(f):
                    if index == cta:
                        clock.gen[local] += 1

    def _initialised(self, machine, f, cta, state, b, offset):
        """The use of an mbarrier must come after its mbarrier.init."""
        if b.init is None:
            return
        agent, number, pc = b.init
        if f is None:
            return  # fence.mbarrier_init matters to other CTAs of a cluster only
        for index, _, local, clock in self._warps(f):
            if index == cta and local != agent and clock.gen[agent] < number:
                where = (cta, state, "shared", local, f.pc)
                self._found("use of an mbarrier before its mbarrier.init", where, offset // GRANULE, agent, pc)

    def fence(self, machine, f, ins, modifiers):
        proxy = "proxy" in modifiers and any(x.startswith("async") for x in modifiers)
        if proxy:
            for _, _, local, clock in self._warps(f):
                np.maximum(clock.asy, clock.gen, out=clock.asy)
                clock.gen[local] += 1

    def batch_end(self, machine):
        """Shared memory that a bulk copy works on must outlive it: somebody waited for a load, its warp for a store."""
        for index, cta in self.ctas.items():
            for agent, (local, store, pc) in cta.latest.items():
                waiters = [cta.clocks[local]] if store else cta.clocks
                if all(c.gen[agent] < cta.issued[agent] for c in waiters) and ("exit", pc) not in self.findings:
                    self.findings["exit", pc] = (
                        f"bulk copy that nobody waited for before the CTA ended: kernel {machine.kernel.name}, "
                        f"CTA {machine.cta_name(index)}, warp {local} at {self._place(pc)}"
                    )

    def wait_done(self, machine, f, ins, what):
        for index, cta, local, clock in self._warps(f):
            w = index * machine.warps_per_cta + local
            if what == "wgmma":
                key, number = ("wgmma", local // 4), int(machine.units["wgmma"].next[w]) - ins.operands[0].value
            elif what.startswith("bulk"):
                key = ("store", local)
                number = int(machine.units["bulk"][32 * w : 32 * w + 32].max()) - ins.operands[0].value
            else:
                key = (what, local)
                number = cta.issued.get(cta.ids.get(key), 0)
            if key in cta.ids:
                clock.set(cta.ids[key], number)
