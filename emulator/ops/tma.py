"""Bulk asynchronous copies (PTX ISA, "Data Movement and Conversion Instructions: Bulk copy" and "Tensor copy"):
cp.async.bulk, cp.async.bulk.tensor (tile mode, 1 to 5 dimensions), bulk groups. Boxes, swizzles and fills are hw.tma's.

A copy is performed when the scheduler chooses. Loads then report their bytes to the mbarrier. Stores read shared
memory in one step and write global memory in a later one, so that wait_group.read and wait_group differ.
"""

import functools

import numpy as np

from .. import ptx
from ..bind import handler, unsupported
from ..engine import Wait
from ..errors import MemoryFault, ProtocolError
from ..hw import tensormap, tma
from ..memory import SHARED_WINDOW, UINT
from .mbarrier import find, signal

decode_map = functools.lru_cache(maxsize=256)(tensormap.decode)


class Copy:
    """One bulk copy. keep: descriptor of what moves: (unit, global addresses, shared offsets, valid, fill, bytes)."""

    def __init__(self, m, f, ins, cta, pieces, mbar=None, lanes=(), group=()):
        self.m, self.ins, self.cta, self.pieces, self.mbar = m, ins, cta, pieces, mbar
        self.lanes, self.group = lanes, group  # issuing lanes and each one's bulk group, for stores
        self.warps = [lanes[0] >> 5]
        self.queue, self.data, self.where = None, None, m.where(f)

    @property
    def unfinished(self):
        return self.mbar is not None or self.data is None

    def _shared(self, unit, offsets, write):
        m = self.m
        flat = m.shared.locate(offsets, self.cta, unit, write)
        if m.watch:
            m.watch.async_access(m, self, "write" if write else "read", "shared", self.cta, offsets, unit)
        return m.shared.buffer.view(unit), flat // unit

    def _global(self, addresses, unit, write):
        if self.m.watch:
            self.m.watch.async_access(self.m, self, "write" if write else "read", "global", self.cta, addresses, unit)
        for b, lanes in self.m.memory.groups(addresses.astype(np.uint64), unit, write):
            yield b.view(unit), (addresses[lanes] - b.origin) // unit, lanes

    def load(self):
        unit, source, dest, valid, fill, nbytes = self.pieces
        out = np.empty(len(dest), UINT[unit])
        out[:] = np.frombuffer(fill, UINT[unit])[0]
        inside = slice(None) if valid is None else np.nonzero(valid)[0]
        at = source[inside]
        if len(at):
            got = np.empty(len(at), UINT[unit])
            for view, index, lanes in self._global(at, unit, False):
                got[lanes] = view[index]
            out[inside] = got
        view, index = self._shared(unit, dest, True)
        view[index] = out
        signal(self.m, self.cta, self.mbar, nbytes)

    def store(self):
        unit, dest, source, valid, _, _ = self.pieces
        if self.data is None:
            view, index = self._shared(unit, source, False)
            self.data = view[index]
            self.m.submit(self)  # the write comes in a later step
            return
        inside = slice(None) if valid is None else np.nonzero(valid)[0]
        at, data = dest[inside], self.data[inside]
        if len(at):
            for view, index, lanes in self._global(at, unit, True):
                view[index] = data[lanes]

    def perform(self):
        self.m.events += 1
        self.load() if self.mbar is not None else self.store()
        if self.m.watch and self not in self.m.pending:
            self.m.watch.async_done(self.m, self)


def read_map(m, address):
    """The tensor map at a generic address (parameter or global memory)."""
    a = np.array([address], np.uint64)
    space, off = m.split(a)
    if address % 64:
        raise MemoryFault(f"tensor map at 0x{address:x}, accepted multiples of 64")
    if space == "param":
        at = int(off[0])
        raw = m.params.data[at : at + 128]
        if at + 128 > m.params.high:
            raise MemoryFault("the tensor map reaches past the kernel's parameters")
    else:
        b, _ = next(iter(m.memory.groups(a, 128, False)))
        raw = b.data[address - b.origin : address - b.origin + 128]
    return decode_map(raw.tobytes())


def _groups(m):
    if "bulk" not in m.units:
        m.units["bulk"] = np.zeros(m.lanes, np.int64)
    return m.units["bulk"]


def _issue(m, f, ins, copy):
    m.submit(copy)
    if m.watch:
        m.watch.async_issue(m, f, ins, copy)


def _offset(address):
    return (address & np.uint64(SHARED_WINDOW - 1)).astype(np.int64)


@handler("cp.async.bulk.tensor")
def tensor_copy(m, ins, mods):
    """cp.async.bulk.tensor.{1..5}d, tile mode: global to shared with an mbarrier, or shared to global in a bulk
    group."""
    tma.check_tensor_variant(ins.opcode)
    rank = int(mods.need(("1d", "2d", "3d", "4d", "5d"), "tensor dimension")[0])
    load = "mbarrier::complete_tx::bytes" in mods.left
    mods.one(("shared::cluster", "shared::cta")), mods.flag("global"), mods.flag("tile")
    mods.flag("mbarrier::complete_tx::bytes"), mods.flag("bulk_group"), mods.flag("L2::cache_hint")
    mods.done()
    ops = ins.operands
    tensor, shared = (ops[1], ops[0]) if load else (ops[0], ops[1])
    if not isinstance(tensor, ptx.Addr) or len(tensor.coords) != rank:
        raise unsupported(ins, f"expected [tensor map, {{{rank} coordinates}}]")
    map_at = m.address(ins, tensor, "")
    coords = [m.read(ins, c, "s32") for c in tensor.coords]
    shared_at = m.address(ins, shared, "shared")
    mbar_at = m.address(ins, ops[2], "shared") if load else None

    def run(f):
        smem, maps = _offset(shared_at(f)).tolist(), map_at(f).tolist()
        bars = _offset(mbar_at(f)).tolist() if load else [None] * f.n
        lanes = f.lanes.tolist()
        at = list(zip(*(c[f.sel].tolist() for c in coords)))
        ctas = m.cta_of_lane[f.lanes].tolist()
        done = {}
        for i in range(f.n):
            if load:
                find(m, ctas[i], bars[i])  # the barrier must exist at issue
            key = (ctas[i], maps[i], at[i], smem[i])
            if not load and key in done:  # lanes that store the same box: one copy, all of them wait for it
                done[key].lanes.append(lanes[i])
                done[key].group.append(int(_groups(m)[lanes[i]]))
                continue
            box = tma.box(read_map(m, maps[i]), at[i], smem[i], store=not load)
            pieces = _pieces(box)
            done[key] = Copy(m, f, ins, ctas[i], pieces, bars[i], [lanes[i]], [int(_groups(m)[lanes[i]])])
            _issue(m, f, ins, done[key])

    return run


def _pieces(box):
    """A hw.tma.Box as (unit up to 8 bytes, global, shared, valid, fill, bytes)."""
    valid = None if box.all_valid else box.valid
    if box.unit < 16:
        return box.unit, box.global_, box.shared, valid, box.fill, box.nbytes
    two = np.array([0, 8])
    return (
        8,
        (box.global_[:, None] + two).ravel(),
        (box.shared[:, None] + two).ravel(),
        None if valid is None else np.repeat(valid, 2),
        box.fill[:8],
        box.nbytes,
    )


@handler("cp.async.bulk")
def bulk_copy(m, ins, mods):
    """cp.async.bulk (not tensor): global to shared with an mbarrier, shared to global in a bulk group."""
    spaces = [p for p in mods.left if p in ("shared::cluster", "shared::cta", "global")]
    load = spaces[-1:] == ["global"]
    if len(spaces) != 2 or "global" not in spaces:
        raise unsupported(ins, "only copies between global and shared memory are modelled")
    for s in spaces:
        mods.flag(s)
    mods.flag("mbarrier::complete_tx::bytes"), mods.flag("bulk_group"), mods.flag("L2::cache_hint")
    mods.done()
    ops = ins.operands
    dst, src = (m.address(ins, o, "") for o in ops[:2])
    size = m.read(ins, ops[2], "u32")
    mbar = m.address(ins, ops[3], "shared") if load else None

    def run(f):
        d, s = dst(f), src(f)
        glob, smem = (s, _offset(d)) if load else (d, _offset(s))
        for i, lane in enumerate(f.lanes.tolist()):
            n, cta = int(size[lane]), int(m.cta_of_lane[lane])
            tma.bulk_copy(int(d[i]) & SHARED_WINDOW - 1, int(s[i]) & SHARED_WINDOW - 1, n)
            steps = np.arange(0, n, 8)
            pieces = (8, int(glob[i]) + steps, int(smem[i]) + steps, None, bytes(8), n)
            bar = int(_offset(mbar(f))[i]) if load else None
            if load:
                find(m, cta, bar)
            _issue(m, f, ins, Copy(m, f, ins, cta, pieces, bar, [lane], [int(_groups(m)[lane])]))

    return run


@handler("cp.reduce.async.bulk")
def bulk_reduce(m, ins, mods):
    """cp.reduce.async.bulk: refused."""
    tma.check_tensor_variant(ins.opcode)
    raise unsupported(ins, "bulk reductions are not modelled")


@handler("cp.async.bulk.commit_group")
def commit(m, ins, mods):
    """cp.async.bulk.commit_group."""
    mods.done()

    def run(f):
        _groups(m)[f.sel] += 1

    return run


@handler("cp.async.bulk.wait_group")
def wait_group(m, ins, mods):
    """cp.async.bulk.wait_group{.read} N."""
    read = mods.flag("read")
    mods.done()
    allowed = ins.operands[0].value

    def ready(f):
        limit = _groups(m) - allowed
        here = np.zeros(m.lanes, bool)
        for op in m.pending:
            if isinstance(op, Copy) and op.mbar is None and not (read and op.data is not None):
                for lane, g in zip(op.lanes, op.group):
                    here[lane] |= g < limit[lane]
        return ~here[f.sel]

    def run(f):
        if ready(f).all():
            if m.watch:
                m.watch.wait_done(m, f, ins, "bulk.read" if read else "bulk")
            return None
        return Wait(ready, lambda g: "its bulk stores", retry=True)

    return run


@handler("tensormap.replace", "tensormap.cp_fenceproxy")
def tensormap_edit(m, ins, mods):
    """tensormap.replace, tensormap.cp_fenceproxy: refused."""
    raise ProtocolError("tensor maps modified on the device are not modelled")
