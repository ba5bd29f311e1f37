"""The machine: fragments of lanes that execute together, the scheduler, barriers and the launch.

A Fragment is any set of lanes at one program counter. Lanes that agree run as one numpy operation, across the warps
of a CTA and across the CTAs of a batch; where control flow differs a fragment splits, and fragments that meet at the
same instruction join again (the lowest program counter runs first, so they do meet). Blocking instructions leave the
fragment waiting; the scheduler looks again when something else has run. A seed gives every warp its own fragment and
picks what runs at random, so that schedules vary; without one the order is fixed and as wide as possible. Both are
legal orders of the PTX memory model's threads (manual, "Memory Consistency Model"); asynchronous operations are
completed by the scheduler, as late as it can unless a seed says otherwise.
"""

from __future__ import annotations

import os
import random

import numpy as np

from . import bind as binding
from .errors import Deadlock, EmulatorError, ProtocolError, UnsupportedInstruction
from .hw.errors import HwError, HwUnsupported
from .inflight import InFlight
from .memory import Buffer, GlobalMemory, WindowMemory

LANE_BUDGET = 8192  # lanes executed together, at most
BYTE_BUDGET = 512 << 20  # registers and shared memory of a batch
HARDWARE = (HwError, HwUnsupported)
QUANTUM = 200_000  # instructions before a fragment must let others of its kind run (spin loops)


class _Signal:
    def __init__(self, name):
        self.name = name

    def __repr__(self):
        return self.name


EXIT = _Signal("EXIT")
PARK = _Signal("PARK")  # the instruction needs more lanes of the warp: wait for them to arrive


class Wait:
    """A blocked fragment. `ready(fragment)` gives True, False or a lane mask; `retry`: execute the instruction again.
    `expire(fragment)`: the wait may give up when nothing else can run; it writes the instruction's negative result."""

    def __init__(self, ready, describe, retry=False, expire=None):
        self.ready, self.describe, self.retry, self.expire = ready, describe, retry, expire


class Fragment:
    """Lanes of a batch (sorted indices; `sel` is a slice where they are contiguous) with one program counter."""

    __slots__ = ("machine", "sel", "n", "pc", "crew", "tired", "_lanes", "_warps", "_whole")

    def __init__(self, machine, lanes, pc, crew=0):
        self.machine, self.pc, self.crew, self.tired = machine, pc, crew, 0
        self.n = len(lanes)
        self._lanes, self._warps, self._whole = lanes, None, None
        first = int(lanes[0])
        self.sel = slice(first, first + self.n) if int(lanes[-1]) - first + 1 == self.n else lanes

    @property
    def lanes(self):
        return self._lanes

    @property
    def warps(self):
        """Sorted indices of the warps with a lane here (batch-wide numbering)."""
        if self._warps is None:
            w = self._lanes >> 5
            self._warps = w[np.concatenate(([True], w[1:] != w[:-1]))]
        return self._warps

    @property
    def whole(self):
        """True if every warp here has all 32 lanes here."""
        if self._whole is None:
            self._whole = self.n == 32 * len(self.warps)
        return self._whole

    def where(self, mask):
        return Fragment(self.machine, self._lanes[mask], self.pc, self.crew)


def threads(block):
    """Threads of a CTA."""
    return block[0] * block[1] * block[2]


def shared_layout(module, kernel):
    """({variable: offset}, offset of the dynamic part): static variables first, then the dynamic part, which all extern
    arrays share (manual, "Shared State Space")."""
    offset, offsets, align = 0, {}, 16
    variables = [v for v in (*module.variables.values(), *kernel.variables.values()) if v.space == "shared"]
    for v in variables:
        if v.size:
            offset = -(-offset // v.align) * v.align
            offsets[v.name] = offset
            offset += v.size
        else:
            align = max(align, v.align)
    offset = -(-offset // align) * align
    return offsets | {v.name: offset for v in variables if not v.size}, offset


def cta_bytes(module, kernel, block, smem):
    """Host memory that the registers, local and shared memory of a CTA take."""
    lanes = 32 * -(-threads(block) // 32)
    registers = sum(binding.BYTES.get(t, 16) for _, t in kernel.registers)
    return lanes * (registers + kernel.local_size) + shared_layout(module, kernel)[1] + smem


def batch_size(module, kernel, block, smem, ctas, cluster=(1, 1, 1)):
    """How many CTAs run together at most: one of few sizes, since each is bound by itself."""
    lanes = 32 * -(-threads(block) // 32)
    most = max(1, min(LANE_BUDGET // lanes, BYTE_BUDGET // max(cta_bytes(module, kernel, block, smem), 1)))
    n, size = next((n for n in (4, 16, 64) if ctas <= n <= most), most), threads(cluster)
    return max(size, n // size * size)


class Machine(binding.Operands):
    """A kernel bound for a block shape and a number of CTAs at a time (`batch`). Its instruction callables are made when
    first reached, and serve every launch and every batch of CTAs after that; `begin` says what is launched."""

    def __init__(self, module, kernel, block, smem, batch, arch, cluster=(1, 1, 1)):
        self.module, self.kernel, self.arch = module, kernel, arch
        self.block, self.cluster, self.batch = block, cluster, batch
        self.threads = threads(block)
        self.warps_per_cta = -(-self.threads // 32)
        self.lanes_per_cta = 32 * self.warps_per_cta
        self.dynamic_smem = smem
        self.shared_offsets, self.dynamic_offset = shared_layout(module, kernel)
        self.shared_size = self.dynamic_offset + smem
        self.lanes = self.batch * self.lanes_per_cta
        self.regs = [None] * len(kernel.registers)
        self.code = [None] * len(kernel.code) + [lambda f: EXIT]
        self.lane = np.arange(self.lanes)
        self.cta_of_lane = self.lane // self.lanes_per_cta
        self.cta_of_warp = np.arange(self.batch * self.warps_per_cta) // self.warps_per_cta
        self.tid = self.lane % self.lanes_per_cta
        self.exists = self.tid < self.threads
        self.ctaid = np.zeros((self.lanes, 3), np.uint32)
        self.shared = WindowMemory("shared memory", self.batch, self.shared_size)
        self.local = WindowMemory("local memory", self.lanes, kernel.local_size) if kernel.local_size else None
        self.bytes = batch * cta_bytes(module, kernel, block, smem)
        self.inflight = InFlight(kernel)
        self.units = {}  # state of asynchronous units, made by their handlers
        self._module_buffers = {}
        self._special, self._of_grid = {}, []
        if kernel.directives.get("reqntid"):
            want = (kernel.directives["reqntid"] + (1, 1))[:3]
            if want != tuple(block):
                raise ProtocolError(f"{kernel.name} was compiled for block {want}, launched with {tuple(block)}")

    def begin(self, grid, params, memory: GlobalMemory, seed=None, watch=None, strict_waits=True):
        """Set up one launch: params is the whole block, as bytes; strict_waits as in launch.Device."""
        self.grid, self.ctas = grid, grid[0] * grid[1] * grid[2]
        self.memory, self.seed, self.watch = memory, seed, watch
        self.rng = None if seed is None else random.Random(seed)
        room = np.frombuffer(bytes(params).ljust(-(-len(params) // 16) * 16 + 16, b"\0"), np.uint8)
        self.params = Buffer(room, 0, 0, len(params), "parameters", writable=False)
        self.strict_waits, self.early_uses = strict_waits, set()
        self.counts = [0] * len(self.code)  # warp instructions executed, per instruction
        self.step = 0  # instructions that the scheduler has run, whatever their width
        self.by_warp = None  # warp instructions per instruction and warp of the batch, where a watcher wants them
        for v, data in self._module_buffers.values():
            self._initialise(v, data)
        for a, of, axis in self._of_grid:
            a[:] = of()[axis]

    def module_address(self, v):
        """Address of a module-scope .global or .const variable, allocated at first use, initialised at each launch."""
        if v.name not in self._module_buffers:
            data = np.zeros(v.size + 16, np.uint8)
            skip = -data.ctypes.data % 16
            self._module_buffers[v.name] = v, data[skip : skip + v.size]
            self._initialise(*self._module_buffers[v.name])
        return self._module_buffers[v.name][1].ctypes.data

    def _initialise(self, v, data):
        data[:] = np.frombuffer(v.init, np.uint8) if v.init else 0
        self.memory.register(data.ctypes.data, v.size, f"variable {v.name}", v.space == "global", data)

    def special(self, ins, name):
        """Array [lanes] of a special register (manual, "Special Registers")."""
        if name in self._special:
            return self._special[name]
        base, _, axis = name[1:].partition(".")
        k = "xyzw".find(axis) if axis else None
        t, b = self.tid.astype(np.uint32), self.block
        fixed = {
            "ntid": lambda: self.block,
            "nctaid": lambda: self.grid,
            "cluster_nctaid": lambda: self.cluster,
            "nclusterid": lambda: tuple(g // c for g, c in zip(self.grid, self.cluster)),
        }
        if base == "tid":
            a = [t % b[0], t // b[0] % b[1], t // (b[0] * b[1])][k]
        elif base == "ctaid":
            return self.ctaid[:, k]  # changes from batch to batch: a view, not a copy
        elif base in fixed:
            a = np.full(self.lanes, fixed[base]()[k], np.uint32)
            self._of_grid.append((a, fixed[base], k))
        elif base == "laneid":
            a = self.lane % 32
        elif base == "warpid":
            a = self.tid // 32
        elif base == "nwarpid":
            a = np.full(self.lanes, self.warps_per_cta)
        elif base.startswith("lanemask_"):
            i = (self.lane % 32).astype(np.uint64)
            one = np.uint64(1)
            eq = one << i
            a = {"eq": eq, "lt": eq - one, "le": eq * np.uint64(2) - one}.get(base[9:])
            if a is None:
                a = {"gt": ~(eq * np.uint64(2) - one), "ge": ~(eq - one)}[base[9:]] & np.uint64(0xFFFFFFFF)
        elif base == "dynamic_smem_size":
            a = np.full(self.lanes, self.dynamic_smem)
        elif base in (
            "cluster_ctarank",
            "cluster_nctarank",
            "clusterid",
            "cluster_ctaid",
            "is_explicit_cluster",
        ) and self.cluster == (1, 1, 1):
            if base == "clusterid":
                return self.ctaid[:, k]
            a = np.full(self.lanes, 1 if base == "cluster_nctarank" else 0)
        else:
            raise binding.unsupported(ins, f"special register {name} is not modelled")
        self._special[name] = a.astype(np.uint32, copy=False)
        return self._special[name]

    def complete(self, f):
        """True if every warp of f has all its live lanes there."""
        if f.whole:
            return True
        here = np.bincount(f.lanes >> 5, minlength=self.batch * self.warps_per_cta)
        return bool((here == self.live.reshape(-1, 32).sum(1))[f.warps].all())

    # ---- running -------------------------------------------------------------------------------------------------

    def run(self):
        """Execute the whole grid."""
        with np.errstate(all="ignore"):
            for first in range(0, self.ctas, self.batch):
                self._run_batch(first, min(self.batch, self.ctas - first))

    def _run_batch(self, first, count):
        gx, gy, _ = self.grid
        ids = np.minimum(first + self.cta_of_lane, self.ctas - 1)
        self.first_cta = first
        self.ctaid[:] = np.stack([ids % gx, ids // gx % gy, ids // (gx * gy)], 1)
        lanes = count * self.lanes_per_cta
        for a in self.regs:
            if a is not None:
                _poison(a[:lanes])
        self.shared.data[: count * self.shared.stride] = 0xFF  # what nobody wrote reads as NaN
        if self.local:
            self.local.data[: lanes * self.local.stride] = 0xFF
        self.live = self.exists & (self.cta_of_lane < count)
        self.barrier_count = np.zeros((self.batch, 16), np.int64)
        self.barrier_generation = np.zeros((self.batch, 16), np.int64)
        self.barrier_expected = np.zeros((self.batch, 16), np.int64)
        self.barrier_pred = {}
        self.performing = None  # the asynchronous operation being performed
        self.pending = []  # asynchronous operations not yet performed, oldest first
        self.units.clear()
        self.inflight.reset(self.batch * self.warps_per_cta)
        self.at_end = []  # checks of asynchronous units after the last warp has exited
        self.events, self.polled, self.expired, self.expired_at = 0, -1, set(), 0
        self.runnable, self.blocked, self.parked = [], [], []
        if self.watch:
            if self.watch.counts_warps:
                self.by_warp = np.zeros((len(self.code), self.batch * self.warps_per_cta), np.int64)
            self.watch.batch_begin(self, first, count)
        lanes = np.nonzero(self.live)[0]
        if self.rng is None:
            self.runnable.append(Fragment(self, lanes, 0))
        else:
            for w in np.unique(lanes >> 5):
                self.runnable.append(Fragment(self, lanes[lanes >> 5 == w], 0, int(w)))
        self._loop()
        for op in self.pending:
            if op.unfinished:
                raise ProtocolError(
                    "the CTA ended while an asynchronous operation that uses its shared or tensor memory or its "
                    "registers was still outstanding (a wait is missing)",
                    op.where,
                )
        while self.pending:
            self._complete_one()
        for check in self.at_end:
            check()
        if self.watch:
            self.watch.batch_end(self)

    def _loop(self):
        while True:
            if self.blocked and self.polled != self.events:
                self.polled = self.events
                self._wake()
            if self.rng is not None and self.pending and self.rng.random() < 0.2:
                self._complete_one()
                continue
            if self.pending and self.runnable and all(f.tired for f in self.runnable):
                self._complete_one()  # what they poll for may depend on it
                continue
            if not self.runnable:
                if self.pending and (self.blocked or self.parked):
                    self._complete_one()
                    continue
                if self._expire():
                    continue
                if self.blocked or self.parked:
                    raise self._deadlock()
                return
            f = self._choose()
            try:
                self._execute(f)
            except EmulatorError as e:
                e.where = e.where or self.where(f)
                raise
            except HARDWARE as e:
                raise _named(e, self.where(f)) from e
            except Exception as e:
                e.add_note(self.where(f))
                raise

    def _choose(self):
        candidates = self.runnable
        if len(candidates) > 1:
            if self.rng is None:
                best = min(candidates, key=lambda f: (f.tired, f.pc))
            else:
                lowest = {}
                for f in candidates:
                    if f.crew not in lowest or (f.tired, f.pc) < (lowest[f.crew].tired, lowest[f.crew].pc):
                        lowest[f.crew] = f
                best = self.rng.choice(list(lowest.values()))
        else:
            best = candidates[0]
        self.runnable.remove(best)
        return best

    def _execute(self, f):
        """Run `f` until it blocks, splits, exits, meets another fragment or has used up its turn."""
        others = [g.pc for g in self.runnable if g.crew == f.crew] + [g.pc for g in self.parked if g.crew == f.crew]
        stop = min((p for p in others if p > f.pc), default=-1)
        left = QUANTUM if self.rng is None else self.rng.randint(1, 300)
        code, counts, nwarps, pc = self.code, self.counts, len(f.warps), f.pc
        by_warp, warps = self.by_warp, f.warps
        if self.watch:
            self.watch.turn(self, f)
        while True:
            step = code[pc]
            if step is None:
                f.pc = pc
                step = code[pc] = binding.bind(self, self.kernel.code[pc])
            f.pc = pc
            counts[pc] += nwarps
            self.step += 1
            if by_warp is not None:
                by_warp[pc, warps] += 1
            r = step(f)
            if r is None:
                pc += 1
                left -= 1
                if pc == stop or left <= 0:
                    break
            elif type(r) is int:
                pc = r
                left -= 1
                if others or left <= 0:
                    break
            else:
                return self._outcome(f, r)
        f.pc = pc
        if left <= 0:
            f.tired += 1
        self._add(f)

    def _outcome(self, f, r):
        if type(r) is tuple:  # predicated: some lanes do it, the rest go on
            part, inner, rest = r
            rest.pc, part.pc = f.pc + 1, f.pc
            self._add(rest)
            if type(inner) is int:
                part.pc = inner
                self._add(part)
            else:
                self._outcome(part, inner)
        elif r is EXIT:
            self.live[f.sel] = False
        elif r is PARK:
            self._park(f)
        elif isinstance(r, Wait):
            self.blocked.append((f, r))
            self.polled = -1  # it may be satisfied already, for some lanes
            if self.watch:
                self.watch.wait_begin(self, f, r)
        else:
            raise TypeError(f"handler returned {r!r}")

    def _join(self, f, pool):
        """Merge f with fragments of its crew at the same pc in `pool` (they leave the pool)."""
        same = [g for g in pool if g.pc == f.pc and g.crew == f.crew]
        if not same:
            return f
        for g in same:
            pool.remove(g)
        joined = Fragment(self, np.sort(np.concatenate([f.lanes, *(g.lanes for g in same)])), f.pc, f.crew)
        joined.tired = max([f.tired, *(g.tired for g in same)])
        return joined

    def _add(self, f):
        self.runnable.append(self._join(self._join(f, self.runnable), self.parked))

    def _park(self, f):
        """Wait for more lanes of f's warps; warps that already have all 32 lanes here go on."""
        joined = self._join(f, self.runnable)
        if joined is not f:
            self.runnable.append(joined)
            return
        counts = np.bincount(f.lanes >> 5, minlength=self.batch * self.warps_per_cta)
        full = (counts == self.live.reshape(-1, 32).sum(1))[f.lanes >> 5]
        if full.any() and not full.all():
            whole, rest = f.where(full), f.where(~full)
            whole.pc = rest.pc = f.pc
            self.runnable.append(whole)
            f = rest
        self.parked.append(f)

    def _wake(self):
        still, woken = [], []
        for f, wait in self.blocked:
            mask = wait.ready(f)
            if mask is False or (mask is not True and not mask.any()):
                still.append((f, wait))
                continue
            if mask is not True and not mask.all():
                rest = f.where(~mask)
                still.append((rest, wait))
                f = f.where(mask)
            if not wait.retry:
                f.pc += 1
            f.tired = 0
            woken.append(f)
            if self.watch:
                self.watch.wait_end(self, f)
        self.blocked = still
        for f in woken:
            self._add(f)

    def _expire(self):
        """Let bounded waits return false when nothing can run; once each until something has happened."""
        if self.expired_at != self.events:
            self.expired, self.expired_at = set(), self.events
        for item in self.blocked:
            f, wait = item
            if wait.expire and (f.pc, int(f.lanes[0])) not in self.expired:
                self.expired.add((f.pc, int(f.lanes[0])))
                self.blocked.remove(item)
                wait.expire(f)
                f.pc += 1
                self._add(f)
                return True
        return False

    # ---- asynchronous operations ---------------------------------------------------------------------------------

    def submit(self, operation):
        """Queue an asynchronous operation: an object with `unfinished` (must it be over before its CTA ends?),
        `queue` (operations of one queue stay in order; None = free) and `perform()`. It is performed later, when the
        scheduler chooses."""
        self.pending.append(operation)

    def force(self, register, f):
        """Perform the pending operations that write `register` of f's warps, and what comes before them in their
        queues."""
        for op in [
            p for p in self.pending if register in getattr(p, "registers", ()) and np.isin(p.warps, f.warps).any()
        ]:
            if op in self.pending:
                for earlier in [p for p in self.pending[: self.pending.index(op) + 1] if p.queue == op.queue]:
                    self._complete(earlier)

    def _complete_one(self):
        """Perform one operation that is first in its queue: a random one, or without a seed the one issued last, so
        that what was issued early stays open for as long as it legally can."""
        seen, free = set(), []
        for op in self.pending:
            if op.queue is None or op.queue not in seen:
                free.append(op)
            seen.add(op.queue)
        self._complete(free[-1] if self.rng is None else self.rng.choice(free))

    def _complete(self, op):
        self.pending.remove(op)
        self.performing = op
        try:
            op.perform()
        except EmulatorError as e:
            e.where = e.where or getattr(op, "where", None)
            raise
        except HARDWARE as e:
            raise _named(e, getattr(op, "where", None)) from e

    # ---- reports -------------------------------------------------------------------------------------------------

    def cta_name(self, index):
        i = self.first_cta + int(index)
        gx, gy, _ = self.grid
        return f"({i % gx},{i // gx % gy},{i // (gx * gy)})"

    def where(self, f):
        """Kernel, CTAs, warps, lanes, PTX line and source line of a fragment."""
        ins = self.kernel.code[f.pc] if f.pc < len(self.kernel.code) else None
        ctas = np.unique(self.cta_of_lane[f.lanes])
        warps = np.unique(f.lanes % self.lanes_per_cta >> 5)
        text = f"kernel {self.kernel.name}, CTA {self.cta_name(ctas[0])}" + (
            f" and {len(ctas) - 1} more" if len(ctas) > 1 else ""
        )
        text += f", warp {ranges(warps)}, lanes {ranges(np.unique(f.lanes & 31))}"
        if ins is not None:
            text += f", PTX line {ins.line}: {ins.text[:120]}"
            text += source(ins)
        return text

    def _deadlock(self):
        lines = ["no warp can go on:"]
        for f, wait in self.blocked:
            lines.append(f"  waits on {wait.describe(f)} [{self.where(f)}]")
        for f in self.parked:
            missing = sorted(set(range(32)) - set((f.lanes[f.lanes >> 5 == f.warps[0]] & 31).tolist()))
            lines.append(f"  waits for lanes {ranges(missing)} of its warp [{self.where(f)}]")
        return Deadlock("\n".join(lines))


def source(ins):
    """", source file:line" of an instruction, or ""; what is installed or below the current folder by its short name."""
    if not ins.source:
        return ""
    file, line = ins.source
    file = file.rpartition("-packages/")[2]
    return f", source {file.removeprefix(os.getcwd() + os.sep)}:{line}"


def _named(error, where):
    """An error of hw's models, which know no kernel, as one that names the place."""
    kind = UnsupportedInstruction if isinstance(error, HwUnsupported) else ProtocolError
    return kind(str(error), where)


def _poison(a):
    """Registers start undefined: all ones, which is NaN in every float format; predicates start false."""
    a.fill(False) if a.dtype == np.bool_ else a.fill(~a.dtype.type(0))


def ranges(values):
    out, values = [], [int(v) for v in values]
    for v in values:
        if out and out[-1][1] == v - 1:
            out[-1][1] = v
        else:
            out.append([v, v])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in out)
