"""PTX ISA, "Data Movement and Conversion Instructions": mov, ld, st, cvta, prefetch; atom and red of "Parallel
Synchronization"."""

import numpy as np

from .. import ptx
from ..bind import BYTES, handler, unsupported
from ..errors import MemoryFault
from ..memory import LOCAL_WINDOW, PARAM_WINDOW, SHARED_WINDOW, align_check, gather

SPACES = ("global", "shared", "shared::cta", "shared::cluster", "local", "param", "const", "param::entry")


@handler("mov")
def mov(m, ins, mods):
    """Data Movement and Conversion: mov: copy, pack a vector into a scalar, unpack a scalar into a vector, address
    of a variable."""
    kind = mods.type()
    mods.done()
    dst, src = ins.operands
    if isinstance(dst, ptx.Vec) or isinstance(src, ptx.Vec):
        return _mov_vector(m, ins, kind, dst, src)
    if isinstance(src, ptx.Special):
        d, a = m.write(ins, dst, kind), m.special(ins, src.name)

        def special(f):
            d[f.sel] = a[f.sel]

        return special
    d, a = m.write(ins, dst, kind), m.read(ins, src, kind)

    def run(f):
        d[f.sel] = a[f.sel]

    return run


def _mov_vector(m, ins, kind, dst, src):
    vec, scalar = (dst, src) if isinstance(dst, ptx.Vec) else (src, dst)
    n = len(vec.items)
    part = BYTES[kind] // n
    if part not in (1, 2, 4, 8) or BYTES[kind] > 8:
        raise unsupported(ins, f"vector mov of .{kind}")
    pk = f"b{8 * part}"
    if vec is src:
        whole = m.write(ins, scalar, kind).view(f"u{part}").reshape(m.lanes, n)
        parts = [m.read(ins, v, pk) for v in vec.items]

        def pack(f):
            s = f.sel
            for i, a in enumerate(parts):
                whole[s, i] = a[s]

        return pack
    whole = np.ascontiguousarray(m.read(ins, scalar, kind)).view(f"u{part}").reshape(m.lanes, n)
    parts = [(i, m.write(ins, v, pk)) for i, v in enumerate(vec.items) if not isinstance(v, ptx.Sink)]

    def unpack(f):
        s = f.sel
        x = whole[s]
        for i, d in parts:
            d[s] = x[:, i]

    return unpack


class Access:
    """Loads and stores of [lanes, count] elements of `size` bytes in one state space ('' = generic)."""

    def __init__(self, m, ins, space, size, count):
        self.m, self.ins, self.size, self.count, self.total = m, ins, size, count, size * count
        self.space = {
            "shared::cta": "shared",
            "shared::cluster": "shared",
            "const": "global",
            "param::entry": "param",
        }.get(space, space)
        self.index = np.arange(count)

    def _place(self, f, address, write):
        """[(buffer, byte offsets, lane selector)]"""
        m, space = self.m, self.space
        align_check(address, self.total, f"{space or 'generic'} access of {self.total} bytes")
        if space == "" or (space == "param" and int(address[0]) >> 56 == 0):
            space, address = m.split(address)
            if space is None:
                raise unsupported(self.ins, "a generic access whose lanes are in different state spaces")
        if m.watch:
            m.watch.access(m, f, self.ins, "write" if write else "read", space, address, self.total)
        if space == "global":
            return [
                (b, (address[s] - np.uint64(b.origin)).astype(np.int64), s)
                for b, s in m.memory.groups(address, self.total, write)
            ]
        if space == "shared":
            return [
                (
                    m.shared.buffer,
                    m.shared.locate(address & np.uint64(SHARED_WINDOW - 1), m.cta_of_lane[f.sel], self.total, write),
                    slice(None),
                )
            ]
        if space == "param":
            off = (address & np.uint64(SHARED_WINDOW - 1)).astype(np.int64)
            if write or int(off.max()) + self.total > m.params.high:
                raise MemoryFault("access outside the kernel's parameters")
            return [(m.params, off, slice(None))]
        return [
            (
                m.local.buffer,
                m.local.locate(address & np.uint64(SHARED_WINDOW - 1), m.lane[f.sel], self.total, write),
                slice(None),
            )
        ]

    def load(self, f, address):
        out = None
        for b, off, s in self._place(f, address, False):
            x = gather(b.views[self.size], off // self.size, self.count)
            if isinstance(s, slice):
                return x
            out = np.zeros((f.n, self.count), x.dtype) if out is None else out
            out[s] = x
        return out

    def store(self, f, address, values):
        for b, off, s in self._place(f, address, True):
            view, at = b.views[self.size], off // self.size
            if self.count == 1:
                view[at] = values[0][s]
            else:
                for i, v in enumerate(values):
                    view[at + i] = v[s]


def _qualifiers(ins, mods):
    """Take the modifiers of ld and st that do not change the value here; returns (space, vector length)."""
    mods.flag("weak"), mods.flag("volatile"), mods.flag("relaxed"), mods.flag("acquire"), mods.flag("release")
    mods.one(("cta", "cluster", "gpu", "sys"))
    space = mods.one(SPACES, "")
    for names in (
        ("ca", "cg", "cs", "lu", "cv", "wb", "wt"),
        ("nc",),
        ("L1::evict_normal", "L1::evict_unchanged", "L1::evict_first", "L1::evict_last", "L1::no_allocate"),
        ("L2::64B", "L2::128B", "L2::256B"),
        ("L2::cache_hint",),
        ("unified",),
    ):
        mods.one(names)
    return space, {"v2": 2, "v4": 4, "v8": 8}.get(mods.one(("v2", "v4", "v8")), 1)


def _items(op, count, ins):
    items = op.items if isinstance(op, ptx.Vec) else (op,)
    if len(items) != count:
        raise unsupported(ins, f"{len(items)} registers for a vector of {count}")
    return items


@handler("ld", "ldu")
def ld(m, ins, mods):
    """Data Movement and Conversion: ld, ld.global.nc, ldu. Registers wider than the type are zero- or sign-extended
    (manual, operand size exceeding instruction-type size)."""
    kind = mods.type()
    polls = {"acquire", "relaxed", "volatile"} & set(ins.parts)  # perhaps what another CTA is to write: let it run
    space, count = _qualifiers(ins, mods)
    mods.done()
    if space.startswith("param") and isinstance(ins.operands[1].base, ptx.Sym):
        return _ld_param(m, ins, kind, count)
    access = Access(m, ins, space, BYTES[kind], count)
    address = m.address(ins, ins.operands[1], space)
    dst = [m.write(ins, o, kind, wide=True) for o in _items(ins.operands[0], count, ins)]
    narrow = np.dtype(f"{'i' if kind[0] == 's' else 'f' if dst[0].dtype.kind == 'f' else 'u'}{BYTES[kind]}")

    def run(f):
        s = f.sel
        f.tired += bool(polls)
        x = access.load(f, address(f)).view(narrow)
        for i, d in enumerate(dst):
            d[s] = x[:, i]

    return run


def _ld_param(m, ins, kind, count):
    """A parameter read at a fixed offset: the same value for every lane."""
    op = ins.operands[1]
    offset = m.address_of(ins, op.base.name) - PARAM_WINDOW + op.offset
    size = BYTES[kind]
    if offset < 0 or offset + size * count > m.params.high:
        raise MemoryFault(f"parameter bytes {offset} to {offset + size * count} are outside the {m.params.high} given")
    narrow = np.dtype(f"{'i' if kind[0] == 's' else 'u'}{size}")
    dst = [m.write(ins, o, kind, wide=True) for o in _items(ins.operands[0], count, ins)]
    dst = [d.view(f"u{d.itemsize}") if d.dtype.kind == "f" else d for d in dst]

    def run(f):
        for d, v in zip(dst, m.params.data[offset : offset + size * count].view(narrow)):
            d[f.sel] = v

    return run


@handler("st")
def st(m, ins, mods):
    """Data Movement and Conversion: st."""
    if mods.flag("async"):
        raise unsupported(ins, "st.async")
    kind = mods.type()
    space, count = _qualifiers(ins, mods)
    mods.done()
    access = Access(m, ins, space, BYTES[kind], count)
    address = m.address(ins, ins.operands[0], space)
    raw = f"b{8 * BYTES[kind]}"
    src = [m.read(ins, o, raw, wide=True) for o in _items(ins.operands[1], count, ins)]

    def run(f):
        s = f.sel
        access.store(f, address(f), [a[s] for a in src])

    return run


@handler("cvta")
def cvta(m, ins, mods):
    """Data Movement and Conversion: cvta: between generic addresses and a state space's own."""
    kind, to = mods.type(), mods.flag("to")
    space = mods.need(SPACES, "cvta")
    mods.done()
    base = {
        "shared": SHARED_WINDOW,
        "shared::cta": SHARED_WINDOW,
        "shared::cluster": SHARED_WINDOW,
        "local": LOCAL_WINDOW,
    }.get(space, 0)  # global, const and param addresses are generic already
    d, a = m.write(ins, ins.operands[0], kind), m.read(ins, ins.operands[1], kind)
    if d.itemsize == 4:
        raise unsupported(ins, "32-bit generic addresses")
    base = d.dtype.type(base)

    def run(f):
        x = a[f.sel]
        # local variables' addresses already carry their window
        d[f.sel] = x & d.dtype.type(SHARED_WINDOW - 1) if to and base else x if to else x | base

    return run


@handler("isspacep")
def isspacep(m, ins, mods):
    """Data Movement and Conversion: isspacep."""
    space = mods.need(SPACES, "isspacep")
    mods.done()
    want = {"shared": 1, "shared::cta": 1, "shared::cluster": 1, "local": 2, "param": 4}.get(space, 0)
    p, a = m.write(ins, ins.operands[0], "pred"), m.read(ins, ins.operands[1], "b64")

    def run(f):
        top = a[f.sel] >> np.uint64(56)
        p[f.sel] = top == want if want else ~np.isin(top, (1, 2, 4))

    return run


@handler("prefetch", "prefetchu", "applypriority", "discard", "cp.async.bulk.prefetch")
def prefetch(m, ins, mods):
    """Data Movement and Conversion: prefetch (prefetch.tensormap too), applypriority, discard: hints; no effect on
    results."""
    return lambda f: None


@handler("createpolicy")
def createpolicy(m, ins, mods):
    """Data Movement and Conversion: createpolicy: an opaque cache policy; zero here."""
    d = m.write(ins, ins.operands[0], "b64")

    def run(f):
        d[f.sel] = 0

    return run


_ATOM = {
    "add": lambda x, y: x + y,
    "min": min,
    "max": max,
    "and": lambda x, y: x & y,
    "or": lambda x, y: x | y,
    "xor": lambda x, y: x ^ y,
    "exch": lambda x, y: y,
}


def _atomic(m, ins, mods, returns):
    kind = mods.type()
    mods.one(("relaxed", "acquire", "release", "acq_rel")), mods.one(("cta", "cluster", "gpu", "sys"))
    space = mods.one(SPACES, "")
    name = mods.need([*_ATOM, "cas", "inc", "dec"], "atomic operation")
    mods.one(("noftz",)), mods.one(("L2::cache_hint",))
    mods.done()
    if kind not in ("u32", "s32", "u64", "s64", "b32", "b64", "f32", "f64"):
        raise unsupported(ins, f"atomics on .{kind}")
    ops = list(ins.operands)
    d = m.write(ins, ops.pop(0), kind) if returns else None
    access = Access(m, ins, space, BYTES[kind], 1)
    address = m.address(ins, ops[0], space)
    args = [m.read(ins, o, kind) for o in ops[1 : 3 if name == "cas" else 2]]
    dtype = args[0].dtype

    def new(old, values):
        if name == "cas":
            return values[1] if old == values[0] else old
        if name == "inc":
            return dtype.type(0) if old >= values[0] else old + dtype.type(1)
        if name == "dec":
            return values[0] if old == 0 or old > values[0] else old - dtype.type(1)
        return _ATOM[name](old, values[0])

    def run(f):
        for b, off, s in access._place(f, address(f), True):
            view, lanes = b.views[dtype.itemsize].view(dtype), f.lanes[s]
            for at, lane in zip((off // dtype.itemsize).tolist(), lanes.tolist()):
                old = view[at]
                view[at] = new(old, [a[lane] for a in args])
                if d is not None:
                    d[lane] = old

    return run


@handler("atom")
def atom(m, ins, mods):
    """Parallel Synchronization and Communication: atom: lanes one after another in lane order (the order is
    unspecified)."""
    return _atomic(m, ins, mods, True)


@handler("red")
def red(m, ins, mods):
    """Parallel Synchronization and Communication: red."""
    return _atomic(m, ins, mods, False)
