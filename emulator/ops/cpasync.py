"""Non-bulk asynchronous copies (PTX ISA, "Data Movement and Conversion Instructions: Non-bulk copy"): cp.async,
commit_group, wait_group, wait_all.

The copy is performed when a wait (or the scheduler, when a seed is given) completes it: never earlier than issued,
and without a wait possibly at the very end, so that a missing wait shows.
"""

import numpy as np

from .. import ptx
from ..bind import handler, unsupported
from .data import Access


class _Copy:
    """One warp-wide cp.async: `group` is each lane's commit group; None until committed."""

    queue = None
    unfinished = False

    def __init__(self, m, f, source, dest, size, read, load, store):
        self.m, self.f, self.source, self.dest, self.size, self.read = m, f, source, dest, size, read
        self.load, self.store = load, store
        self.group = _state(m)["next"][f.sel].copy()
        self.where = m.where(f)

    def perform(self):
        self.part(self.f, slice(None))

    def part(self, f, rows):
        """Copy for some lanes: bytes past `read` (the src-size operand) are zero."""
        words = self.size // 4
        out = np.zeros((f.n, words), np.uint32)
        n = self.read[rows]
        full = n == self.size
        if full.any():
            g, at = (f, self.source[rows]) if full.all() else (f.where(full), self.source[rows][full])
            out[full] = self.load.load(g, at)
        for i in np.nonzero(~full & (n > 0))[0]:  # rare: a partial source
            g = f.where(np.arange(f.n) == i)
            at = self.source[rows][i : i + 1]
            raw = np.zeros(self.size, np.uint8)
            for b in range(int(n[i])):
                raw[b] = self.load.byte(g, at + np.uint64(b))
            out[i] = raw.view(np.uint32)
        self.store.store(f, self.dest[rows], [out[:, w] for w in range(words)])


def _state(m):
    if "cp" not in m.units:
        m.units["cp"] = {"next": np.zeros(m.lanes, np.int64)}
    return m.units["cp"]


def complete(m, f, allowed):
    """Perform the copies of f's lanes in groups older than the `allowed` most recent ones."""
    limit = _state(m)["next"] - allowed
    for op in [p for p in m.pending if isinstance(p, _Copy)]:
        if op.f.lanes[-1] < f.lanes[0] or op.f.lanes[0] > f.lanes[-1]:
            continue
        mine = np.isin(op.f.lanes, f.lanes, assume_unique=True) & (op.group < limit[op.f.lanes])
        if mine.all():
            m.pending.remove(op)
            op.perform()
        elif mine.any():
            op.part(op.f.where(mine), mine)
            rest = ~mine
            op.f = op.f.where(rest)
            op.source, op.dest, op.read, op.group = op.source[rest], op.dest[rest], op.read[rest], op.group[rest]


@handler("cp.async")
def cp_async(m, ins, mods):
    """Data Movement and Conversion: cp.async.{ca,cg}.shared.global [dst], [src], cp-size{, src-size}: the rest of
    cp-size is zero-filled."""
    mods.need(("ca", "cg"), "cp.async")
    mods.need(("shared", "shared::cta"), "cp.async"), mods.need(("global",), "cp.async")
    mods.one(("L2::64B", "L2::128B", "L2::256B")), mods.one(("L2::cache_hint",))
    mods.done()
    size = ins.operands[2].value if isinstance(ins.operands[2], ptx.Imm) else None
    if size not in (4, 8, 16):
        raise unsupported(ins, "cp-size must be 4, 8 or 16")
    dst, src = m.address(ins, ins.operands[0], "shared"), m.address(ins, ins.operands[1], "global")
    given = ins.operands[3] if len(ins.operands) > 3 else ptx.Imm(size)
    if isinstance(given, ptx.Reg) and given.type == "pred":
        raise unsupported(ins, "the ignore-src form")
    read = m.read(ins, given, "u32")
    load, store = Access(m, ins, "global", 4, size // 4), Access(m, ins, "shared", 4, size // 4)
    byte = Access(m, ins, "global", 1, 1)
    load.byte = lambda g, at: byte.load(g, at)[0, 0]

    def run(f):
        n = np.minimum(read[f.sel].astype(np.int64), size)
        source = src(f).copy()  # with no offset it is a view of the register, which moves on before the copy is done
        m.submit(_Copy(m, f, source, dst(f), size, n, load, store))

    return run


@handler("cp.async.commit_group")
def commit_group(m, ins, mods):
    """Data Movement and Conversion: cp.async.commit_group."""
    mods.done()

    def run(f):
        _state(m)["next"][f.sel] += 1

    return run


@handler("cp.async.wait_group", "cp.async.wait_all")
def wait_group(m, ins, mods):
    """Data Movement and Conversion: cp.async.wait_group N and wait_all."""
    mods.done()
    every = ins.parts[2] == "wait_all"
    allowed = 0 if every else ins.operands[0].value

    def run(f):
        # wait_all also covers copies not yet committed
        complete(m, f, -1 if every else allowed)
        if m.watch:
            m.watch.cp_async_wait(m, f, ins, allowed)

    return run
