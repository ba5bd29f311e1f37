"""PTX ISA: shfl ("Data Movement and Conversion"), vote, match, redux, activemask, elect ("Parallel
Synchronization")."""

import numpy as np

from .. import ptx
from ..bind import handler, unsupported
from ..errors import ProtocolError
from .control import gather_members, mask_operand


def full_warps(m, f, a, fill=0):
    """Values of `a` as [warps, 32] for f's warps, and lane presence (None when all are present)."""
    if f.whole:
        return a[f.sel].reshape(-1, 32), None
    out = np.full((len(f.warps), 32), fill, a.dtype)
    here = np.zeros((len(f.warps), 32), bool)
    row = np.searchsorted(f.warps, f.lanes >> 5)
    out[row, f.lanes & 31] = a[f.sel]
    here[row, f.lanes & 31] = True
    return out, here


def back(f, x):
    """[warps, 32] values to the lanes of f."""
    return x.reshape(-1) if f.whole else x[np.searchsorted(f.warps, f.lanes >> 5), f.lanes & 31]


@handler("shfl.sync")
def shfl(m, ins, mods):
    """Data Movement and Conversion: shfl.sync.{up,down,bfly,idx}.b32, with an optional in-range predicate d|p."""
    mode = mods.need(("up", "down", "bfly", "idx"), "shfl")
    if mods.type() != "b32":
        raise unsupported(ins, "shfl of other than .b32")
    mods.done()
    ops = ins.operands
    dst, pred = (ops[0].first, ops[0].second) if isinstance(ops[0], ptx.Pair) else (ops[0], None)
    d = m.write(ins, dst, "b32")
    p = m.write(ins, pred, "pred") if pred is not None else None
    a, b, c = (m.read(ins, o, "b32") for o in ops[1:4])
    mask = mask_operand(m, ins, ops[4])
    lane = np.arange(32)

    def run(f):
        r = gather_members(m, f, mask)
        if r is not None:
            return r
        x, here = full_warps(m, f, a)
        bv, cv = (full_warps(m, f, v)[0].astype(np.int64) for v in (b, c))
        bv = bv & 31
        clamp, seg = cv & 31, cv >> 8 & 31
        limit = (lane & seg) | (clamp & ~seg)
        low = lane & seg
        if mode == "up":
            j = lane - bv
            ok = j >= limit
        elif mode == "down":
            j = lane + bv
            ok = j <= limit
        elif mode == "bfly":
            j = lane ^ bv
            ok = j <= limit
        else:
            j = low | (bv & ~seg)
            ok = j <= limit
        j = np.where(ok, j, lane)
        if here is not None and (~np.take_along_axis(here, j, 1) & here).any():
            raise ProtocolError("shfl.sync reads a lane that does not take part (its value is undefined)")
        d[f.sel] = back(f, np.take_along_axis(x, j, 1))
        if p is not None:
            p[f.sel] = back(f, ok)
        return None

    return run


@handler("vote.sync")
def vote(m, ins, mods):
    """Parallel Synchronization and Communication: vote.sync.{all,any,uni}.pred and .ballot.b32."""
    mode = mods.need(("all", "any", "uni", "ballot"), "vote")
    kind = mods.type()
    mods.done()
    from .integer import read_pred

    d, p = m.write(ins, ins.operands[0], kind), read_pred(m, ins, ins.operands[1])
    mask = mask_operand(m, ins, ins.operands[2])

    def run(f):
        r = gather_members(m, f, mask)
        if r is not None:
            return r
        v = np.zeros((m.lanes,), bool)
        v[f.sel] = p(f)
        x, here = full_warps(m, f, v)
        mv, _ = full_warps(m, f, mask)
        rows = _members(mv, here)
        yes, no = (rows & x[:, None, :]), (rows & ~x[:, None, :])
        if mode == "ballot":
            out = (yes.astype(np.uint32) << np.arange(32, dtype=np.uint32)).sum(2, dtype=np.uint32)
        elif mode == "all":
            out = ~no.any(2)
        elif mode == "any":
            out = yes.any(2)
        else:
            out = ~(no.any(2) & yes.any(2))
        d[f.sel] = back(f, out)
        return None

    return run


def _members(mask, here):
    """[warps, 32, 32]: for each lane, which lanes its membermask names (and are present)."""
    rows = (mask[:, :, None] >> np.arange(32, dtype=np.uint32) & np.uint32(1)).astype(bool)
    return rows if here is None else rows & here[:, None, :]


@handler("match.sync", "match.any.sync", "match.all.sync")
def match(m, ins, mods):
    """Parallel Synchronization and Communication: match.sync."""
    raise unsupported(ins, "match.sync")


@handler("redux.sync")
def redux(m, ins, mods):
    """Parallel Synchronization and Communication: redux.sync: add, min, max on 32-bit integers; and, or, xor; min,
    max on f32 (sm_100a), with .abs and .NaN."""
    op = mods.need(("add", "min", "max", "and", "or", "xor"), "redux")
    absolute, nan = mods.flag("abs"), mods.flag("NaN")
    kind = mods.type()
    mods.done()
    d, a = m.write(ins, ins.operands[0], kind), m.read(ins, ins.operands[1], kind)
    mask = mask_operand(m, ins, ins.operands[2])
    reduce = {
        "add": np.add,
        "min": np.minimum,
        "max": np.maximum,
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
    }[op]
    if kind == "f32":
        reduce = {"min": np.minimum, "max": np.maximum}[op] if nan else {"min": np.fmin, "max": np.fmax}[op]
    info = np.finfo(a.dtype) if kind == "f32" else np.iinfo(a.dtype)
    identity = {"add": 0, "or": 0, "xor": 0, "and": -1, "min": info.max, "max": info.min}[op]
    if kind == "f32":
        identity = np.inf if op == "min" else -np.inf

    def run(f):
        r = gather_members(m, f, mask)
        if r is not None:
            return r
        x, here = full_warps(m, f, a)
        mv, _ = full_warps(m, f, mask)
        x = np.abs(x) if absolute else x
        ident = np.array(identity).astype(a.dtype)
        d[f.sel] = back(f, reduce.reduce(np.where(_members(mv, here), x[:, None, :], ident), axis=2, dtype=a.dtype))
        return None

    return run


@handler("activemask")
def activemask(m, ins, mods):
    """Parallel Synchronization and Communication: activemask.b32: the lanes executing together here."""
    mods.type()
    mods.done()
    d = m.write(ins, ins.operands[0], "b32")

    def run(f):
        x, here = full_warps(m, f, np.ones(m.lanes, np.uint32))
        bits = (x << np.arange(32, dtype=np.uint32)).sum(1, dtype=np.uint32)
        d[f.sel] = back(f, np.repeat(bits[:, None], 32, 1))

    return run


@handler("elect.sync")
def elect(m, ins, mods):
    """Parallel Synchronization and Communication: elect.sync: elects the lowest lane of the membermask (the manual
    leaves the choice open; it is deterministic)."""
    mods.done()
    ops = ins.operands
    if not isinstance(ops[0], ptx.Pair):
        raise unsupported(ins, "elect.sync without d|p")
    d, p = m.write(ins, ops[0].first, "b32"), m.write(ins, ops[0].second, "pred")
    mask = mask_operand(m, ins, ops[1])

    def run(f):
        r = gather_members(m, f, mask)
        if r is not None:
            return r
        mv, here = full_warps(m, f, mask)
        leader = back(f, _members(mv, here).argmax(2).astype(np.uint32))
        d[f.sel] = leader
        p[f.sel] = leader == (f.lanes & 31)
        return None

    return run
