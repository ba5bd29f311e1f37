"""wgmma (PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions", sm_90a); fragments, descriptors and numerics
are hw's.

An operation is of the warps of one warpgroup that are at the instruction together: each computes 16 of the 64 rows.
Registers and shared memory are read when the scheduler performs the operation, in order within a warpgroup, and
accumulators change only then. Until the warps have waited, their accumulator registers keep the old values, so a
missing wait_group shows.
"""

import numpy as np

from .. import ptx
from ..bind import handler, unsupported
from ..engine import PARK, Wait
from ..errors import ProtocolError
from ..inflight import registers
from ..hw import matrix_desc, wgmma
from .integer import read_pred

SHAPES = {"bf16": 16, "f16": 16, "tf32": 8}


class Groups:
    """Per warp: open group, operations issued and performed, and how many had been issued at the last 16 commits (at
    most 7 groups can stay open at a wait)."""

    def __init__(self, warps):
        self.next, self.issued, self.done = (np.zeros(warps, np.int64) for _ in range(3))
        self.at_commit = np.zeros((warps, 16), np.int64)
        self.fenced = np.zeros(warps, bool)  # has the warp executed a wgmma.fence?

    def finished(self, warps, allowed):
        """Bool per warp: all but the `allowed` latest groups are complete."""
        g = self.next[warps] - allowed - 1
        return (g < 0) | (self.done[warps] >= self.at_commit[warps, g % 16])


def _groups(m):
    if "wgmma" not in m.units:
        m.units["wgmma"] = Groups(m.batch * m.warps_per_cta)
    return m.units["wgmma"]


def _warpgroups(m, f):
    """The parts of f that belong to one warpgroup of one CTA each: [(CTA, warpgroup in it, fragment)]."""
    cta = m.cta_of_warp[f.warps]
    group = (f.warps - cta * m.warps_per_cta) // 4
    key = cta * m.warps_per_cta + group
    if key[0] == key[-1]:
        return [(int(cta[0]), int(group[0]), f)]
    keys, first = np.unique(key, return_index=True)
    return [(int(cta[i]), int(group[i]), f.where(np.repeat(key == k, 32))) for k, i in zip(keys, first)]


class Mma:
    """One wgmma.mma_async of warps of one warpgroup."""

    unfinished = True

    def __init__(self, m, cta, warpgroup, f, ins, perform):
        self.m, self.cta, self.f, self.ins, self._perform = m, cta, f, ins, perform
        self.warps = f.warps
        self.queue, self.where = ("wgmma", cta, warpgroup), m.where(f)
        self.group = int(_groups(m).next[f.warps].max())
        _groups(m).issued[f.warps] += 1
        self.registers = frozenset(registers(ins.operands[0]))

    def perform(self):
        self.m.events += 1
        self._perform(self)
        _groups(self.m).done[self.f.warps] += 1
        if self.m.watch:
            self.m.watch.async_done(self.m, self)


def _alike(words, what):
    if (words != words[0]).any():
        raise ProtocolError(f"wgmma: the warps of a warpgroup give different {what}")
    return int(words[0])


@handler("wgmma.mma_async")
def mma_async(m, ins, mods):
    """wgmma.mma_async.sync.aligned.m64nNk{16,8}.{f32,f16}.{bf16,f16,tf32}: A in registers or shared memory, B in
    shared memory."""
    if m.arch != "sm_90a":
        raise unsupported(ins, f"wgmma does not exist on {m.arch}")
    if not (mods.flag("sync") and mods.flag("aligned")) or mods.flag("sp"):
        raise unsupported(ins, "wgmma.mma_async without .sync.aligned, or sparse")
    shape, types = mods.left[0], mods.left[1:]
    if not shape.startswith("m64n") or len(types) != 3 or types[1] != types[2]:
        raise unsupported(ins, f"wgmma shape {shape} with types {'.'.join(types)}")
    out, kind = types[0], types[1]
    n, k = (int(x) for x in shape[4:].split("k"))
    if SHAPES.get(kind) != k:
        raise unsupported(ins, f"wgmma {shape} with {kind} operands")
    ops = ins.operands
    in_registers = isinstance(ops[1], ptx.Vec)
    scale_d = read_pred(m, ins, ops[3]) if len(ops) > 3 else None
    scale_a, scale_b, *trans = [o.value for o in ops[4:]] or [1, 1]
    if not in_registers and len(trans) == 2:
        trans_a, trans_b = trans
    else:
        trans_a, trans_b = 0, (trans[0] if trans else 0)
    wgmma.check(n, kind, out, trans_a, trans_b)
    if out != "f32":
        raise unsupported(ins, "fp16 accumulators of wgmma")
    dst = [m.write(ins, o, "b32") for o in ops[0].items]
    if len(dst) != n // 2:
        raise unsupported(ins, f"{len(dst)} accumulator registers, {n // 2} expected")
    a_regs = [m.read(ins, o, "b32") for o in ops[1].items] if in_registers else None
    a_desc = None if in_registers else m.read(ins, ops[1], "b64")
    b_desc = m.read(ins, ops[2], "b64")
    esize = 2 if k == 16 else 4
    d_row, d_col = (x[:, :32] for x in wgmma.d_layout(n))
    a_row, a_col = (x[:, :32] for x in wgmma.a_layout(kind))
    raw = np.uint16 if esize == 2 else np.uint32
    d_index, a_index = registers(ops[0]), registers(ops[1]) if in_registers else []

    def operand(op, word, mn, major, quarters=None):
        desc, at = matrix_desc.decode_wgmma(word), op.cta * m.shared.stride
        if m.watch:
            units = matrix_desc.operand_units(desc, mn, k, esize, major)
            if quarters is None:  # every warp reads all of B
                m.watch.async_access(m, op, "read", "shared", op.cta, units, 16)
            else:
                for w, q in zip(op.warps, quarters):
                    m.watch.async_access(m, op, "read", "shared", op.cta, units.reshape(4, -1)[q], 16, w)
        return matrix_desc.gather_operand(m.shared.data[at : at + m.shared.size], desc, mn, k, esize, major)

    def perform(op):
        f, warps = op.f, len(op.warps)
        b = operand(op, op.b_word, n, "MN" if trans_b else "K")
        if in_registers:
            x = np.stack([r[f.sel].reshape(-1, 32) for r in a_regs], 1)  # [warps, registers, 32]
            if esize == 2:
                x = np.ascontiguousarray(x[..., None]).view(np.uint16).swapaxes(2, 3).reshape(warps, -1, 32)
            a = np.empty((warps, 16, k), raw)
            a[:, a_row, a_col] = x
        else:
            quarters = op.warps % m.warps_per_cta % 4
            a = operand(op, op.a_word, 64, "MN" if trans_a else "K", quarters).reshape(4, 16, k)[quarters]
        d = np.stack([r[f.sel].reshape(-1, 32) for r in dst], 1).view(np.float32)
        acc = np.empty((warps, 16, n), np.float32)
        acc[:, d_row, d_col] = d
        r = (
            wgmma.mma(a, b, acc, kind, scale_d=True, scale_a=scale_a, scale_b=scale_b)
            if op.scale.all()
            else wgmma.mma(
                a, b, np.where(op.scale[:, None, None], acc, np.float32(0)), kind, scale_a=scale_a, scale_b=scale_b
            )
        )
        flat = np.ascontiguousarray(r[:, d_row, d_col]).view(np.uint32)
        for i, reg in enumerate(dst):
            reg[f.sel] = flat[:, i].reshape(-1)

    def issue(cta, warpgroup, f):
        op = Mma(m, cta, warpgroup, f, ins, perform)
        for i in d_index:
            m.inflight.mark(i, f.warps, op.group)
        for i in a_index:
            m.inflight.mark(i, f.warps, op.group, m.inflight.lent)
        lead = f.warps * 32
        op.b_word = _alike(b_desc[lead], "matrix descriptors of B")
        op.a_word = None if in_registers else _alike(a_desc[lead], "matrix descriptors of A")
        op.scale = np.ones(len(f.warps), bool) if scale_d is None else scale_d(f).reshape(-1, 32)[:, 0]
        m.submit(op)
        if m.watch:
            m.watch.async_issue(m, f, ins, op)

    def run(f):
        if not f.whole:
            return PARK
        busy = m.inflight.touched(a_index, f.warps) if m.inflight.busy else None
        if busy is not None:
            raise ProtocolError(
                f"wgmma reads register {m.inflight.name(busy)}, the result of an operation this warp has not waited for"
            )
        m.inflight.check_fence(d_index + a_index, f.warps)
        if not _groups(m).fenced[f.warps].all():
            raise ProtocolError("wgmma before the first wgmma.fence of this warp")
        for cta, warpgroup, part in _warpgroups(m, f):
            issue(cta, warpgroup, part)
        return None

    return run


@handler("wgmma.fence")
def fence(m, ins, mods):
    """wgmma.fence.sync.aligned: orders register and shared accesses before the next wgmma; watchers are told."""

    def run(f):
        if not f.whole:
            return PARK
        m.inflight.fence(f.warps)
        _groups(m).fenced[f.warps] = True
        if m.watch:
            m.watch.fence(m, f, ins, ("wgmma",))
        return None

    return run


@handler("wgmma.commit_group")
def commit(m, ins, mods):
    """wgmma.commit_group.sync.aligned."""

    def run(f):
        if not f.whole:
            return PARK
        g, w = _groups(m), f.warps
        g.at_commit[w, g.next[w] % 16] = g.issued[w]
        g.next[w] += 1
        return None

    return run


@handler("wgmma.wait_group")
def wait_group(m, ins, mods):
    """wgmma.wait_group.sync.aligned N."""
    allowed = ins.operands[0].value
    if not 0 <= allowed <= 7:
        raise ProtocolError(f"wgmma.wait_group {allowed}: accepted 0 to 7")

    def ready(f):
        return _groups(m).finished(f.lanes[::32] >> 5, allowed).repeat(32)

    def run(f):
        if not f.whole:
            return PARK
        if ready(f).all():
            m.inflight.release(f.warps, (_groups(m).next - allowed)[f.warps])
            if m.watch:
                m.watch.wait_done(m, f, ins, "wgmma")
            return None
        return Wait(ready, lambda g: "its wgmma groups", retry=True)

    return run
