"""A watcher of memory that belongs to somebody: global allocations, and the shared bytes that hold mbarriers.

Global memory, one record per byte of every allocation that it was told of: who wrote it last. It finds reads of what
nobody wrote, writes into inputs, and bytes that two CTAs of one launch write, or one writes and another reads (unless
the second has acquired what the first released after it wrote, or the kernel has global atomics, with which CTAs may
agree on an order). What a CTA has acquired its bulk and tensor copies know once a fence.proxy.async has passed it on (PTX ISA,
"Memory Consistency Model: Proxies"). Whose threads within a CTA release and acquire is not asked. Allocations that it was not told of are
left to the bounds checks of `memory.GlobalMemory`.

Barriers: accesses other than mbarrier instructions to the bytes of a live mbarrier, and storage used for two of them
(PTX ISA, "mbarrier": the contents may be touched by mbarrier operations alone, and initialising a live one is
undefined); CTAs that end with a phase or a CTA barrier half arrived.
"""

from __future__ import annotations

import bisect
import contextlib

import numpy as np

from .memory import SHARED_WINDOW
from .ops.mbarrier import table
from .watch import Watch

NOBODY, HOST = 0, 1
_EMPTY = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted")


class _Region:
    """Bytes [low, high) of one allocation. writer: per byte NOBODY, HOST, or the number of a CTA of some launch; when: the
    watcher's clock at that CTA's last write."""

    def __init__(self, low, high, name, readonly, writer):
        self.low, self.high, self.name, self.readonly = low, high, name, readonly
        self.writer, self.when = np.full(high - low, writer, np.int32), np.zeros(high - low, np.int64)


class MemoryWatch(Watch):
    """findings: {key: message}, one per kind and PTX line; `report()` gives the messages.

    protect(tensor, name): an input: written, and to be left alone. fresh(tensor, name): an allocation that holds
    nothing yet. written(tensor): the host has filled it. following(poison): a context in which torch's own allocations
    and writes are followed.
    """

    def __init__(self):
        self.findings = {}
        self.regions, self.lows, self.next, self.clock = [], [], 2, 0

    def report(self):
        return list(self.findings.values())

    # ---- what the host says ------------------------------------------------------------------------------------------

    def protect(self, tensor, name):
        self._add(tensor, name, True, HOST)

    def fresh(self, tensor, name):
        self._add(tensor, name, False, NOBODY)

    def written(self, tensor):
        low, high = _bounds(tensor)
        for r in self._near(low, high):
            r.writer[max(low - r.low, 0) : max(high - r.low, 0)] = HOST

    def forget(self, low, high):
        """The memory is somebody else's now."""
        for r in self._near(low, high):
            i = self.regions.index(r)
            del self.regions[i], self.lows[i]

    def _add(self, tensor, name, readonly, writer):
        storage = tensor.untyped_storage()
        low = storage.data_ptr()
        if not storage.nbytes():
            return
        self.forget(low, low + storage.nbytes())
        i = bisect.bisect(self.lows, low)
        self.lows.insert(i, low)
        self.regions.insert(i, _Region(low, low + storage.nbytes(), name, readonly, writer))

    def _near(self, low, high):
        i = max(bisect.bisect(self.lows, low) - 1, 0)
        j = bisect.bisect_left(self.lows, high)
        return [r for r in self.regions[i:j] if r.low < high and low < r.high]

    @contextlib.contextmanager
    def following(self, poison=None):
        """Inside, what torch allocates is followed: empty tensors hold nothing, all others what torch put there.
        poison: a byte to fill empty tensors with, so that two runs with different ones show whether it matters."""
        from torch.utils._python_dispatch import TorchDispatchMode

        watch = self

        class Follow(TorchDispatchMode):
            def __torch_dispatch__(self, function, types, args=(), kwargs=None):
                result = function(*args, **(kwargs or {}))
                watch._host(function, args, kwargs or {}, result, poison)
                return result

        with Follow():
            yield self

    def _host(self, function, args, kwargs, result, poison):
        name = function.overloadpacket.__name__
        schema = function._schema
        if name in _EMPTY:
            if poison is not None and result.numel():
                _bytes(result)[:] = poison
            self.fresh(result, f"empty {list(result.shape)} {str(result.dtype).removeprefix('torch.')}")
            return
        given = {a.name: v for a, v in zip(schema.arguments, args)} | kwargs
        for a in schema.arguments:
            if a.alias_info and a.alias_info.is_write and hasattr(given.get(a.name), "untyped_storage"):
                self.written(given[a.name])
        for r, value in zip(schema.returns, result if isinstance(result, tuple) else (result,)):
            if r.alias_info is None and hasattr(value, "untyped_storage"):
                self.forget(*_storage(value))

    # ---- global memory -----------------------------------------------------------------------------------------------

    def launch(self, machine):
        self.first, self.next = self.next, self.next + machine.ctas
        self.released = {}  # address -> (CTA, clock) of the last store.release to it
        self.acquired = {}  # (reader, writer) -> the clock up to which reader knows what writer wrote
        self.passed = {}  # the same for reader's asynchronous operations
        self.together = any(
            i.parts[0] in ("atom", "red") and not any(p.startswith("shared") for p in i.parts) for i in machine.kernel.code
        )

    def access(self, machine, f, ins, kind, space, address, nbytes):
        if space == "shared":
            self._shared(machine, f, ins, kind, address, nbytes)
        elif space == "global":
            lanes = lambda bad: machine.where(f.where(bad.any(1)))  # noqa: E731
            at, cta, qualifiers = address.astype(np.int64), machine.cta_of_lane[f.lanes], ins.parts
            me = self.first + machine.first_cta + cta
            if "acquire" in qualifiers:
                self._acquire(me.tolist(), at.tolist())
            self._global(machine, kind, at, nbytes, cta, lanes, f.pc, self.acquired)
            if "release" in qualifiers and kind == "write":
                self.released |= {address: (writer, self.clock) for address, writer in zip(at.tolist(), me.tolist())}

    def async_access(self, machine, op, kind, space, cta, address, nbytes, warp=None):
        if space == "global":
            at = np.asarray(address).astype(np.int64).reshape(-1)
            self._global(machine, kind, at, nbytes, cta, lambda bad: op.where, getattr(op, "pc", op.where), self.passed)
        elif space == "shared":
            at = np.asarray(address).reshape(-1)
            self._barrier_storage(machine, cta, kind, int(at.min()), at, nbytes, op.where)

    def fence(self, machine, f, ins, modifiers):
        if self.acquired and modifiers in (("proxy", "async"), ("proxy", "async", "global")):
            here = set((self.first + machine.first_cta + machine.cta_of_lane[f.lanes]).tolist())
            self.passed |= {pair: clock for pair, clock in self.acquired.items() if pair[0] in here}

    def _acquire(self, me, at):
        for reader, address in zip(me, at):
            if address in self.released:
                writer, clock = self.released[address]
                self.acquired[reader, writer] = max(clock, self.acquired.get((reader, writer), 0))

    def _unordered(self, other, me, last, when, known):
        """Of the accesses to what another CTA wrote, those that nothing known, (reader, writer) -> clock, puts in order."""
        pairs = np.stack(np.broadcast_arrays(me, last), -1)[other]
        out = other.copy()
        out[other] = when[other] > [known.get(tuple(p), -1) for p in pairs.tolist()]
        return out

    def _global(self, machine, kind, at, nbytes, cta, where, key, known):
        """Lanes (or pieces) at addresses `at`: checked against the record of every byte, then recorded."""
        self.clock += 1
        for r in self._near(int(at.min()), int(at.max()) + nbytes):
            here = (at < r.high) & (at + nbytes > r.low)
            cells = np.clip(at[:, None] - r.low + np.arange(nbytes), 0, len(r.writer) - 1)
            me = (self.first + machine.first_cta + np.broadcast_to(cta, at.shape))[:, None]
            last = r.writer[cells]
            other = (last >= self.first) & (last != me) & here[:, None]
            if known and not self.together and other.any():
                other = self._unordered(other, me, last, r.when[cells], known)
            if kind == "write" and r.readonly and here.any():
                self._tell("write into an input", key, r, at, here[:, None] & (last == last), where)
            elif other.any() and not self.together:
                what = "write of" if kind == "write" else "read of"
                self._tell(f"{what} what another CTA of the same launch wrote", key, r, at, other, where)
            if kind == "write":
                r.writer[cells[here]] = np.broadcast_to(me, cells.shape)[here]
                r.when[cells[here]] = self.clock
            else:
                bad = (last == NOBODY) & here[:, None]
                if bad.any():
                    self._tell("read of global memory that nobody wrote", key, r, at, bad, where)

    def _tell(self, what, key, region, at, bad, where):
        if (what, key) not in self.findings:
            i, j = (int(x) for x in np.argwhere(bad)[0])
            place = int(at[i]) + j - region.low
            self.findings[what, key] = f"{what}: {region.name}, byte {place} of {region.high - region.low} [{where(bad)}]"

    # ---- mbarriers ---------------------------------------------------------------------------------------------------

    def batch_begin(self, machine, first_cta, ctas):
        self.live = {}  # CTA -> {offset: place of its mbarrier.init}
        self.lowest = {}  # CTA -> (lowest, highest + 8) offset of a live mbarrier

    def mbarrier(self, machine, f, ins, event, cta, offset, detail):
        if event not in ("init", "inval"):
            return
        live = self.live.setdefault(cta, {})
        if event == "inval":
            live.pop(offset, None)
        else:
            where = machine.where(f)
            if live.get(offset, where) != where:
                self._storage(offset, f"is initialised as an mbarrier again [{where}]", live[offset], f.pc)
            live[offset] = where
        self.lowest[cta] = (min(live), max(live) + 8) if live else (0, 0)

    def _shared(self, machine, f, ins, kind, address, nbytes):
        if not self.live:
            return
        at = (address & np.uint64(SHARED_WINDOW - 1)).astype(np.int64)
        ctas = machine.cta_of_lane[f.lanes]
        for cta in np.unique(ctas).tolist():
            low, high = self.lowest.get(cta, (0, 0))
            near = (at < high) & (at + nbytes > low) & (ctas == cta)
            if near.any():
                self._barrier_storage(machine, cta, kind, 0, at[near], nbytes, None, f, near)

    def _barrier_storage(self, machine, cta, kind, lowest, at, nbytes, where, f=None, near=None):
        low, high = self.lowest.get(cta, (0, 0))
        if lowest >= high:
            return
        for offset, made in self.live.get(cta, {}).items():
            hit = (at < offset + 8) & (at + nbytes > offset)
            if hit.any():
                place = where or machine.where(f.where(np.nonzero(near)[0][hit]))
                self._storage(offset, f"holds a live mbarrier and is {'written' if kind == 'write' else 'read'} [{place}]",
                              made, f.pc if f else place)  # fmt: skip

    def _storage(self, offset, what, made, key):
        self.findings.setdefault(("storage", key), f"mbarrier storage: shared address 0x{offset:x} {what}; the mbarrier [{made}]")

    def batch_end(self, machine):
        for (cta, offset), b in table(machine).items():
            if b.pending != b.expected or b.tx:
                made = self.live.get(cta, {}).get(offset, "")
                self.findings.setdefault(
                    ("count", machine.kernel.name, offset),
                    f"barrier counts: CTA {machine.cta_name(cta)} of {machine.kernel.name} ended with mbarrier 0x{offset:x} in "
                    f"{b.missing()}; the mbarrier [{made}]",
                )
        for cta, barrier in np.argwhere(machine.barrier_count).tolist():
            self.findings.setdefault(
                ("count", machine.kernel.name, -barrier),
                f"barrier counts: CTA {machine.cta_name(cta)} of {machine.kernel.name} ended with barrier {barrier} half full: "
                f"{machine.barrier_count[cta, barrier]} of {machine.barrier_expected[cta, barrier]} threads have arrived",
            )


def _storage(tensor):
    s = tensor.untyped_storage()
    return s.data_ptr(), s.data_ptr() + s.nbytes()


def _bounds(tensor):
    """First byte and the one past the last that the tensor's elements span."""
    if not tensor.numel():
        return 0, 0
    es, low = tensor.element_size(), tensor.data_ptr()
    return low, low + es + sum((n - 1) * s * es for n, s in zip(tensor.shape, tensor.stride()))


def _bytes(tensor):
    """A tensor's memory as a numpy array of bytes."""
    import ctypes

    low, high = _bounds(tensor)
    return np.ctypeslib.as_array((ctypes.c_uint8 * (high - low)).from_address(low))
