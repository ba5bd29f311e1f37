"""tcgen05 (PTX ISA, "TensorCore 5th Generation Family Instructions", sm_100a), .cta_group::1 only; layouts and
numerics are hw's.

mma and commit of a CTA are performed in issue order, ld and st of a warp likewise, and the two streams are not
ordered against each other except through mbarriers and waits, as in the manual's "Memory Consistency Model" section:
a missing wait shows.
"""

import functools

import numpy as np

from .. import ptx
from ..bind import handler, unsupported
from ..engine import PARK, Wait
from ..errors import ProtocolError
from ..inflight import registers
from ..hw import matrix_desc, tcgen05, tmem
from ..memory import SHARED_WINDOW
from .integer import read_pred
from .mbarrier import find, signal

POISON = 0xFFFFFFFF  # NaN: what nobody wrote


class Tensor:
    """Tensor memory of a batch: uint32 [CTAs, 128, 512] and one allocator per CTA."""

    def __init__(self, m):
        self.data = np.full((m.batch, tmem.LANES, tmem.COLUMNS), POISON, np.uint32)
        self.allocators = {}
        self.made = {}  # CTA -> place of its last tcgen05.alloc

    def allocator(self, cta):
        return self.allocators.setdefault(cta, tmem.Allocator())

    def check(self, cta, column, columns, what):
        a = self.allocator(cta)
        if not a.allocated(column, columns):
            raise ProtocolError(
                f"{what} touches tensor-memory columns {column} to {column + columns - 1}, allocated are {a.describe()}"
            )


def state(m):
    if "tmem" not in m.units:
        m.units["tmem"] = Tensor(m)
        m.at_end.append(lambda: leaks(m))
    return m.units["tmem"]


def leaks(m):
    for cta, a in state(m).allocators.items():
        if a.leaks():
            said = f"CTA {m.cta_name(cta)} ended without freeing tensor memory: {a.describe()} of the allocation"
            raise ProtocolError(said, state(m).made[cta])


class Operation:
    """An asynchronous tcgen05 operation."""

    unfinished = True

    def __init__(self, m, f, ins, queue, warp, perform):
        self.m, self.f, self.ins, self.queue, self._perform = m, f, ins, queue, perform
        self.where = m.where(f)
        self.kind, self.warp, self.warps, self.registers = ins.parts[1], warp, [warp], ()
        self.cta = int(m.cta_of_warp[warp])

    def perform(self):
        self.m.events += 1
        self._perform()
        if self.m.watch:
            self.m.watch.async_done(self.m, self)


def _submit(m, f, ins, op):
    m.submit(op)
    if m.watch:
        m.watch.async_issue(m, f, ins, op)


def _warp_mods(m, ins, mods):
    if m.arch == "sm_90a":
        raise unsupported(ins, f"tcgen05 does not exist on {m.arch}")
    tmem.refuse(ins.opcode)
    mods.flag("cta_group::1"), mods.flag("sync"), mods.flag("aligned"), mods.flag("b32")
    mods.one(("shared::cta", "shared"))


@handler("tcgen05.alloc", "tcgen05.dealloc", "tcgen05.relinquish_alloc_permit")
def alloc(m, ins, mods):
    """tcgen05.alloc, .dealloc, .relinquish_alloc_permit: one warp; alloc writes the address to shared memory and may
    block."""
    _warp_mods(m, ins, mods)
    mods.done()
    what = ins.parts[1]
    ops = ins.operands
    columns = m.read(ins, ops[1], "u32") if len(ops) > 1 else None
    where = m.address(ins, ops[0], "shared") if what == "alloc" else m.read(ins, ops[0], "b32") if ops else None

    def run(f):
        if not f.whole:
            return PARK
        ctas = m.cta_of_warp[f.warps]
        if len(np.unique(ctas)) < len(ctas):
            raise ProtocolError(f"tcgen05.{what} by several warps of a CTA at once")
        at = where(f) if what == "alloc" else None
        for j, (w, cta) in enumerate(zip(f.warps.tolist(), ctas.tolist())):
            lane = w * 32
            allocator = state(m).allocator(cta)
            m.events += 1
            if what == "alloc":
                got = allocator.alloc(int(columns[lane]))
                if got is None:
                    return Wait(lambda g: True, lambda g: "tensor memory to become free", retry=True)
                state(m).made[cta] = m.where(f)
                place = m.shared.locate(at[32 * j : 32 * j + 1] & np.uint64(SHARED_WINDOW - 1), cta, 4, True)
                m.shared.buffer.views[4][place // 4] = got
                if m.watch:
                    m.watch.access(m, f, ins, "write", "shared", at, 4)
            elif what == "dealloc":
                allocator.dealloc(int(where[lane]), int(columns[lane]))
            else:
                allocator.relinquish()
        return None

    return run


@handler("tcgen05.mma")
def mma(m, ins, mods):
    """tcgen05.mma.cta_group::1.kind::{f16,tf32} [d], a-desc or [a], b-desc, idesc, {disable-output-lane},
    enable-input-d."""
    if m.arch == "sm_90a":
        raise unsupported(ins, f"tcgen05 does not exist on {m.arch}")
    kind = tcgen05.check_variant(ins.opcode)
    mods.flag("cta_group::1"), mods.flag(f"kind::{kind}")
    for p in [p for p in mods.left if p.startswith("collector::")]:
        mods.left.remove(p)  # collector usage is a hint about operand reuse; it does not change the result
    mods.done()
    ops = list(ins.operands)
    d_at = m.address(ins, ops[0], "")
    a_tensor = m.address(ins, ops[1], "") if isinstance(ops[1], ptx.Addr) else None
    a_desc = None if a_tensor else m.read(ins, ops[1], "b64")
    b_desc, idesc = m.read(ins, ops[2], "b64"), m.read(ins, ops[3], "b32")
    rest = ops[4:]
    disable = [m.read(ins, v, "b32") for v in rest.pop(0).items] if isinstance(rest[0], ptx.Vec) else []
    enable = read_pred(m, ins, rest.pop(0))
    if rest:
        raise unsupported(ins, "scale-input-d")

    def operand(op, cta, word, mn, i, major):
        desc = matrix_desc.decode_tcgen05(word)
        smem = m.shared.data[cta * m.shared.stride : cta * m.shared.stride + m.shared.size]
        if m.watch:
            m.watch.async_access(
                m, op, "read", "shared", cta, matrix_desc.operand_units(desc, mn, i.k, i.esize, major), 16
            )
        return matrix_desc.gather_operand(smem, desc, mn, i.k, i.esize, major)

    def run(f):
        flags = enable(f).tolist()
        for j, lane in enumerate(f.lanes.tolist()):
            _issue(f, j, lane, int(m.cta_of_lane[lane]), flags[j])

    def _issue(f, j, lane, cta, accumulate):
        i = tcgen05.decode_idesc(int(idesc[lane]), kind)
        taddr, b_word = int(d_at(f)[j]), int(b_desc[lane])
        a_word = int(a_tensor(f)[j]) if a_tensor else int(a_desc[lane])
        off = sum(int(v[lane]) << 32 * p for p, v in enumerate(disable))
        t = state(m)
        _, columns = tcgen05.d_cells(taddr, i.m, i.n)
        t.check(cta, columns.start, i.n, "tcgen05.mma")

        def perform():
            cells = t.data[cta]
            t.check(cta, columns.start, i.n, "tcgen05.mma, performed after its tensor memory was freed,")
            a = tcgen05.read_a(cells, a_word, i.m, i.a) if a_tensor else operand(op, cta, a_word, i.m, i, i.major_a)
            b = operand(op, cta, b_word, i.n, i, i.major_b)
            if m.watch:
                if a_tensor:
                    m.watch.async_access(m, op, "read", "tensor", cta, tcgen05.a_cells(a_word, i.m, i.a), 4)
                if accumulate:
                    m.watch.async_access(m, op, "read", "tensor", cta, tcgen05.d_cells(taddr, i.m, i.n), 4)
                m.watch.async_access(m, op, "write", "tensor", cta, tcgen05.d_cells(taddr, i.m, i.n), 4)
            d = tcgen05.read_d(cells, taddr, i.m, i.n) if accumulate else None
            tcgen05.write_d(cells, taddr, tcgen05.mma(a, b, d, i, accumulate=accumulate), off)

        op = Operation(m, f, ins, ("tcgen05", cta), lane >> 5, perform)
        op.shape = i.m, i.n, i.k
        _submit(m, f, ins, op)

    return run


@handler("tcgen05.commit")
def commit(m, ins, mods):
    """tcgen05.commit...mbarrier::arrive::one: an arrival when the thread's earlier asynchronous tcgen05 operations
    are complete."""
    _warp_mods(m, ins, mods)
    if not mods.flag("mbarrier::arrive::one"):
        raise unsupported(ins, "tcgen05.commit without .mbarrier::arrive::one")
    mods.one(("shared::cluster",)), mods.flag("b64")
    mods.done()
    address = m.address(ins, ins.operands[0], "shared")

    def run(f):
        offsets = (address(f) & np.uint64(SHARED_WINDOW - 1)).tolist()
        for lane, offset in zip(f.lanes.tolist(), offsets):
            cta = int(m.cta_of_lane[lane])
            find(m, cta, offset)
            arrive = functools.partial(signal, m, cta, offset)
            op = Operation(m, f, ins, ("tcgen05", cta), lane >> 5, arrive)
            _submit(m, f, ins, op)

    return run


def _shape(ins, mods):
    shape = mods.need(tuple(tmem.SHAPES), "tcgen05 shape")
    number = mods.need(tuple(f"x{1 << i}" for i in range(8)), "tcgen05 repeat")
    packed = mods.flag("pack::16b", "unpack::16b")
    mods.done()
    split = 0
    if shape == "16x32bx2":
        split = ins.operands[1 if ins.parts[1] == "st" else 2].value
    return tmem.fragment(shape, int(number[1:]), packed, split)


@handler("tcgen05.ld", "tcgen05.st")
def ld_st(m, ins, mods):
    """tcgen05.ld and tcgen05.st: asynchronous, complete at tcgen05.wait::ld or ::st; registers change when
    performed."""
    _warp_mods(m, ins, mods)
    load = ins.parts[1] == "ld"
    frag = _shape(ins, mods)
    vec, addr = (ins.operands[0], ins.operands[1]) if load else (ins.operands[-1], ins.operands[0])
    items = getattr(vec, "items", (vec,))
    if len(items) != len(frag.lane):
        raise unsupported(ins, f"{len(items)} registers, {len(frag.lane)} expected")
    index = registers(vec)
    regs = [m.write(ins, o, "b32") if load else m.read(ins, o, "b32") for o in items]
    address = m.address(ins, addr, "")

    def run(f):
        if not f.whole:
            return PARK
        at = address(f).reshape(-1, 32)
        if (at != at[:, :1]).any():
            raise ProtocolError("tcgen05.ld/st: lanes of a warp give different addresses")
        for w, taddr in zip(f.warps.tolist(), at[:, 0].tolist()):
            _issue(f, w, taddr)
        return None

    def _issue(f, w, taddr):
        cta, warp, lanes, t = int(m.cta_of_warp[w]), w % m.warps_per_cta, slice(32 * w, 32 * w + 32), state(m)
        _, column = tmem.check_access(frag, taddr, warp)
        t.check(cta, column, frag.columns, ins.parts[0] + "." + ins.parts[1])

        def perform():
            if m.watch:
                lane, col = tmem.check_access(frag, taddr, warp)
                m.watch.async_access(
                    m, op, "read" if load else "write", "tensor", cta, (frag.lane + lane, frag.column + col), 4
                )
            if load:
                x = tmem.load(t.data[cta], frag, taddr, warp)
                for i, r in enumerate(regs):
                    r[lanes] = x[i]
            else:
                tmem.store(t.data[cta], frag, taddr, warp, np.stack([r[lanes] for r in regs]))

        op = Operation(m, f, ins, ("tcgen05 ld st", w), w, perform)
        if load:
            op.registers = frozenset(index)
            for i in index:
                m.inflight.mark(i, [w])
        _submit(m, f, ins, op)

    return run


@handler("tcgen05.wait::ld", "tcgen05.wait::st")
def wait(m, ins, mods):
    """tcgen05.wait::ld, tcgen05.wait::st .sync.aligned."""
    kind = ins.parts[1].split("::")[1]

    def ready(f):
        busy = np.zeros(m.batch * m.warps_per_cta, bool)
        for op in m.pending:
            if isinstance(op, Operation) and op.kind == kind:
                busy[op.warp] = True
        return ~busy[f.lanes >> 5]

    def run(f):
        if not f.whole:
            return PARK
        if ready(f).all():
            if kind == "ld":
                m.inflight.release(f.warps, 1)
            if m.watch:
                m.watch.wait_done(m, f, ins, f"tcgen05.{kind}")
            return None
        return Wait(ready, lambda g: f"its tcgen05.{kind} operations", retry=True)

    return run


@handler("tcgen05.fence::before_thread_sync", "tcgen05.fence::after_thread_sync")
def fence(m, ins, mods):
    """tcgen05.fence::{before,after}_thread_sync: ordering only; watchers are told."""
    what = ins.parts[1].split("::")[1]
    mods.done()

    def run(f):
        if m.watch:
            m.watch.fence(m, f, ins, ("tcgen05", what))

    return run


@handler("tcgen05.cp", "tcgen05.shift")
def refused(m, ins, mods):
    """tcgen05.cp, tcgen05.shift: refused."""
    tmem.refuse(ins.opcode)
