"""PTX ISA, "Integer Arithmetic", "Comparison and Selection" and "Logic and Shift Instructions"."""

import numpy as np

from .. import ptx
from ..bind import handler, unsupported

INTS = {"u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64", "b8", "b16", "b32", "b64"}
_WIDE = {"u16": "u32", "s16": "s32", "u32": "u64", "s32": "s64"}


def binary(m, ins, kind, fn):
    d = m.write(ins, ins.operands[0], kind)
    a, b = (m.read(ins, o, kind) for o in ins.operands[1:3])

    def run(f):
        s = f.sel
        d[s] = fn(a[s], b[s])

    return run


def unary(m, ins, kind, fn):
    d, a = m.write(ins, ins.operands[0], kind), m.read(ins, ins.operands[1], kind)

    def run(f):
        d[f.sel] = fn(a[f.sel])

    return run


def int_add_sub(m, ins, mods, kind, fn):
    """Integer Arithmetic: add, sub: integer forms wrap; .sat for s32 saturates."""
    if mods.flag("sat"):
        if kind != "s32":
            raise unsupported(ins, ".sat is for .s32")
        wide = fn
        info = np.iinfo(np.int32)
        fn = lambda x, y: np.clip(wide(x.astype(np.int64), y.astype(np.int64)), info.min, info.max).astype(np.int32)  # noqa: E731
    mods.done()
    return binary(m, ins, kind, fn)


def mul_high(x, y):
    """Upper half of the product, same dtype."""
    if x.itemsize <= 4:
        wide = np.dtype(f"{x.dtype.kind}{2 * x.itemsize}")
        return (x.astype(wide) * y.astype(wide) >> wide.type(8 * x.itemsize)).astype(x.dtype)
    ux, uy = x.view(np.uint64) if x.dtype.kind == "i" else x, y.view(np.uint64) if y.dtype.kind == "i" else y
    m32, s32 = np.uint64(0xFFFFFFFF), np.uint64(32)
    xl, xh, yl, yh = ux & m32, ux >> s32, uy & m32, uy >> s32
    t = xl * yl
    u = xh * yl + (t >> s32)
    w = xl * yh + (u & m32)
    hi = xh * yh + (u >> s32) + (w >> s32)
    if x.dtype.kind == "i":
        hi = hi - np.where(x < 0, uy, np.uint64(0)) - np.where(y < 0, ux, np.uint64(0))
        return hi.view(np.int64)
    return hi


def int_mul(m, ins, mods, kind):
    """Integer Arithmetic: mul: .lo, .hi, .wide."""
    part = mods.need(("lo", "hi", "wide"), "integer mul")
    mods.done()
    if part != "wide":
        return binary(m, ins, kind, np.multiply if part == "lo" else mul_high)
    out = _WIDE[kind]
    d = m.write(ins, ins.operands[0], out)
    a, b = (m.read(ins, o, kind) for o in ins.operands[1:3])

    def run(f):
        d[f.sel] = a[f.sel].astype(d.dtype) * b[f.sel]

    return run


def int_mad(m, ins, mods, kind):
    """Integer Arithmetic: mad: .lo, .hi, .wide."""
    part = mods.need(("lo", "hi", "wide"), "integer mad")
    mods.done()
    out = _WIDE[kind] if part == "wide" else kind
    d, c = m.write(ins, ins.operands[0], out), m.read(ins, ins.operands[3], out)
    a, b = (m.read(ins, o, kind) for o in ins.operands[1:3])

    def run(f):
        s = f.sel
        if part == "hi":
            d[s] = mul_high(a[s], b[s]) + c[s]
        elif part == "wide":
            d[s] = a[s].astype(d.dtype) * b[s] + c[s]
        else:
            d[s] = a[s] * b[s] + c[s]

    return run


def int_divide(x, y):
    """Truncating division; division by zero gives all ones, as the hardware sequence does (the manual leaves the
    result unspecified)."""
    if x.dtype.kind == "u":
        return np.where(y == 0, ~x.dtype.type(0), x // np.where(y == 0, x.dtype.type(1), y))
    safe = np.where(y == 0, x.dtype.type(1), y)
    q = x // safe
    q = q + ((q * safe != x) & ((x < 0) != (safe < 0))).astype(x.dtype)
    return np.where(y == 0, x.dtype.type(-1), q)


def int_remainder(x, y):
    """Integer Arithmetic: rem: sign of the dividend."""
    safe = np.where(y == 0, x.dtype.type(1), y)
    return np.where(y == 0, x, x - int_divide(x, safe) * safe)


@handler("rem")
def rem(m, ins, mods):
    """Integer Arithmetic: rem."""
    kind = mods.type()
    mods.done()
    return binary(m, ins, kind, int_remainder)


@handler("mul24", "mad24")
def mul24(m, ins, mods):
    """Integer Arithmetic: mul24, mad24, .lo: low 32 bits of the 48-bit product of 24-bit operands."""
    kind = mods.type()
    mods.need(("lo",), "mul24")
    mods.done()
    d = m.write(ins, ins.operands[0], kind)
    a, b, *c = [m.read(ins, o, kind) for o in ins.operands[1:]]
    shift = d.dtype.type(8)

    def run(f):
        s = f.sel
        r = (a[s] << shift >> shift) * (b[s] << shift >> shift)
        d[s] = r + c[0][s] if c else r

    return run


def _logic(fn):
    def make(m, ins, mods):
        kind = mods.type()
        mods.done()
        return binary(m, ins, kind, fn) if kind != "pred" else _pred_logic(m, ins, fn)

    return make


def _pred_logic(m, ins, fn):
    d = m.write(ins, ins.operands[0], "pred")
    a, b = (read_pred(m, ins, o) for o in ins.operands[1:3])

    def run(f):
        d[f.sel] = fn(a(f), b(f))

    return run


def read_pred(m, ins, op):
    """Function fragment -> bool array for a predicate operand, possibly negated."""
    if isinstance(op, ptx.Not):
        inner = m.read(ins, op.item, "pred")
        return lambda f: ~inner[f.sel]
    a = m.read(ins, op, "pred")
    return lambda f: a[f.sel]


@handler("and")
def and_(m, ins, mods):
    """Logic and Shift: and."""
    return _logic(np.bitwise_and)(m, ins, mods)


@handler("or")
def or_(m, ins, mods):
    """Logic and Shift: or."""
    return _logic(np.bitwise_or)(m, ins, mods)


@handler("xor")
def xor(m, ins, mods):
    """Logic and Shift: xor."""
    return _logic(np.bitwise_xor)(m, ins, mods)


@handler("not")
def not_(m, ins, mods):
    """Logic and Shift: not."""
    kind = mods.type()
    mods.done()
    return unary(m, ins, kind, np.invert)


@handler("cnot")
def cnot(m, ins, mods):
    """Logic and Shift: cnot: 1 where the operand is 0."""
    kind = mods.type()
    mods.done()
    return unary(m, ins, kind, lambda x: (x == 0).astype(x.dtype))


@handler("lop3")
def lop3(m, ins, mods):
    """Logic and Shift: lop3.b32: any function of three bits, by truth table."""
    mods.type()
    mods.done()
    d = m.write(ins, ins.operands[0], "b32")
    a, b, c = (m.read(ins, o, "b32") for o in ins.operands[1:4])
    table = ins.operands[4].value

    def run(f):
        x, y, z = a[f.sel], b[f.sel], c[f.sel]
        r = np.zeros(f.n, np.uint32)
        for i in range(8):
            if table >> i & 1:
                r |= (x if i & 4 else ~x) & (y if i & 2 else ~y) & (z if i & 1 else ~z)
        d[f.sel] = r

    return run


@handler("shl", "shr")
def shift(m, ins, mods):
    """Logic and Shift: shl, shr; amounts past the width clamp."""
    kind = mods.type()
    mods.done()
    d, a = m.write(ins, ins.operands[0], kind), m.read(ins, ins.operands[1], kind)
    b = m.read(ins, ins.operands[2], "u32")
    bits, left = 8 * d.itemsize, ins.parts[0] == "shl"
    big = d.dtype.type

    def run(f):
        x, n = a[f.sel], b[f.sel]
        over = n >= bits
        k = np.where(over, np.uint32(bits - 1), n).astype(d.dtype)
        r = x << k if left else x >> k
        if over.any():
            r = np.where(over, np.where(x < 0, big(-1), big(0)) if d.dtype.kind == "i" and not left else big(0), r)
        d[f.sel] = r

    return run


@handler("shf")
def shf(m, ins, mods):
    """Logic and Shift: shf.{l,r}.{clamp,wrap}.b32: funnel shift of the 64-bit value {b, a}."""
    mods.type()
    side, mode = mods.need(("l", "r"), "shf"), mods.need(("clamp", "wrap"), "shf")
    mods.done()
    d = m.write(ins, ins.operands[0], "b32")
    a, b, c = (m.read(ins, o, "b32") for o in ins.operands[1:4])

    def run(f):
        s = f.sel
        n = (c[s] & np.uint32(31) if mode == "wrap" else np.minimum(c[s], np.uint32(32))).astype(np.uint64)
        both = b[s].astype(np.uint64) << np.uint64(32) | a[s]
        d[s] = ((both >> np.uint64(32) - n) if side == "l" else both >> n).astype(np.uint32)

    return run


@handler("bfe")
def bfe(m, ins, mods):
    """Integer Arithmetic: bfe: extract a bit field, sign-extended for signed types. The manual takes position and
    length modulo 256; the 64-bit form takes all 32 bits of them, measured on an H200 (driver 580)."""
    kind = mods.type()
    mods.done()
    d, a = m.write(ins, ins.operands[0], kind), m.read(ins, ins.operands[1], "b" + kind[1:])
    pos, length = (m.read(ins, o, "u32") for o in ins.operands[2:4])
    bits = 8 * d.itemsize
    u, within = a.dtype.type, np.uint32(255 if d.itemsize == 4 else 0xFFFFFFFF)

    def run(f):
        s = f.sel
        p, n = ((x[s] & within).astype(np.int64) for x in (pos, length))
        x = a[s]
        shifted = np.where(p < bits, x >> np.minimum(p, bits - 1).astype(a.dtype), u(0))
        mask = np.where(n >= bits, ~u(0), (u(1) << np.minimum(n, bits - 1).astype(a.dtype)) - u(1))
        r = shifted & mask
        if d.dtype.kind == "i":
            sign_at = np.minimum(p + n - 1, bits - 1)
            sign = (x >> np.maximum(sign_at, 0).astype(a.dtype) & u(1)).astype(bool) & (n > 0)
            # bits from the end of the field (or of the operand) upwards copy the sign
            have = np.clip(np.minimum(n, bits - p), 0, bits)
            keep = np.where(have >= bits, ~u(0), (u(1) << np.minimum(have, bits - 1).astype(a.dtype)) - u(1))
            r = np.where(sign, r | ~keep, r & keep)
        d[s] = r.view(d.dtype)

    return run


@handler("bfi")
def bfi(m, ins, mods):
    """Integer Arithmetic: bfi: insert the low bits of a into b."""
    kind = mods.type()
    mods.done()
    d = m.write(ins, ins.operands[0], kind)
    a, b = (m.read(ins, o, kind) for o in ins.operands[1:3])
    pos, length = (m.read(ins, o, "u32") for o in ins.operands[3:5])
    bits, u = 8 * d.itemsize, d.dtype.type

    def run(f):
        s = f.sel
        p, n = (pos[s] & np.uint32(255)).astype(np.int64), (length[s] & np.uint32(255)).astype(np.int64)
        n = np.clip(np.minimum(n, bits - p), 0, bits)
        field = np.where(n >= bits, ~u(0), (u(1) << np.minimum(n, bits - 1).astype(d.dtype)) - u(1))
        shift_by = np.minimum(p, bits - 1).astype(d.dtype)
        mask = np.where(n > 0, field << shift_by, u(0))
        d[s] = b[s] & ~mask | a[s] << shift_by & mask

    return run


@handler("bmsk")
def bmsk(m, ins, mods):
    """Integer Arithmetic: bmsk.{clamp,wrap}.b32: a mask of `width` ones from `start`."""
    mods.type()
    mode = mods.need(("clamp", "wrap"), "bmsk")
    mods.done()
    d = m.write(ins, ins.operands[0], "b32")
    a, b = (m.read(ins, o, "b32") for o in ins.operands[1:3])

    def run(f):
        lim = (lambda x: x & np.uint32(31)) if mode == "wrap" else (lambda x: np.minimum(x, np.uint32(32)))
        p, n = lim(a[f.sel]).astype(np.uint64), lim(b[f.sel]).astype(np.uint64)
        d[f.sel] = ((np.uint64(1) << n) - np.uint64(1) << p & np.uint64(0xFFFFFFFF)).astype(np.uint32)

    return run


def _popcount(x):
    return np.unpackbits(np.ascontiguousarray(x).view(np.uint8).reshape(len(x), -1), axis=1).sum(1).astype(np.uint32)


def _clz(x):
    bits = np.unpackbits(np.ascontiguousarray(x.byteswap()).view(np.uint8).reshape(len(x), -1), axis=1)
    return np.where(bits.any(1), bits.argmax(1), bits.shape[1]).astype(np.uint32)


def _count(fn):
    def make(m, ins, mods):
        kind = mods.type()
        mods.done()
        d, a = m.write(ins, ins.operands[0], "u32"), m.read(ins, ins.operands[1], kind)

        def run(f):
            d[f.sel] = fn(a[f.sel])

        return run

    return make


@handler("popc")
def popc(m, ins, mods):
    """Integer Arithmetic: popc."""
    return _count(_popcount)(m, ins, mods)


@handler("clz")
def clz(m, ins, mods):
    """Integer Arithmetic: clz."""
    return _count(_clz)(m, ins, mods)


@handler("bfind")
def bfind(m, ins, mods):
    """Integer Arithmetic: bfind: position of the highest set bit (of ~a for negative signed a); 0xffffffff if none."""
    kind = mods.type()
    amount = mods.flag("shiftamt")
    mods.done()
    d, a = m.write(ins, ins.operands[0], "u32"), m.read(ins, ins.operands[1], kind)
    bits = 8 * a.itemsize

    def run(f):
        x = a[f.sel]
        if x.dtype.kind == "i":
            x = np.where(x < 0, ~x, x)
        z = _clz(x.astype(f"u{a.itemsize}"))
        d[f.sel] = np.where(z == bits, np.uint32(0xFFFFFFFF), z if amount else np.uint32(bits - 1) - z)

    return run


@handler("brev")
def brev(m, ins, mods):
    """Integer Arithmetic: brev."""
    kind = mods.type()
    mods.done()

    def reverse(x):
        b = np.unpackbits(np.ascontiguousarray(x).view(np.uint8).reshape(len(x), -1), axis=1, bitorder="little")
        return np.packbits(b[:, ::-1], axis=1, bitorder="little").view(x.dtype).ravel()

    return unary(m, ins, kind, reverse)


@handler("prmt")
def prmt(m, ins, mods):
    """Data Movement and Conversion: prmt.b32: pick four bytes of {b, a}; bit 3 of a selector copies the byte's sign.
    Default mode only."""
    mods.type()
    mods.done()
    d = m.write(ins, ins.operands[0], "b32")
    a, b, c = (m.read(ins, o, "b32") for o in ins.operands[1:4])

    def run(f):
        s = f.sel
        both = np.stack([a[s], b[s]], 1).view(np.uint8)  # [n, 8]
        nib = np.stack([c[s] >> np.uint32(4 * i) & np.uint32(15) for i in range(4)], 1).astype(np.int64)
        r = np.take_along_axis(both, nib & 7, 1)
        r = np.where(nib & 8, np.where(r & 0x80, 0xFF, 0), r).astype(np.uint8)
        d[s] = np.ascontiguousarray(r).view(np.uint32).ravel()

    return run


_COMPARE = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lo": np.less,
    "ls": np.less_equal,
    "hi": np.greater,
    "hs": np.greater_equal,
}
_BOOL = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


def comparison(ins, mods, kind):
    """Comparison operators, ordered and unordered, for setp and set."""
    names = [*_COMPARE, *(n + "u" for n in ("eq", "ne", "lt", "le", "gt", "ge")), "num", "nan"]
    name = mods.need(names, "comparison")
    is_float = kind in ("f16", "bf16", "f32", "f64")
    if name in ("num", "nan"):
        either = lambda x, y: np.isnan(x) | np.isnan(y)  # noqa: E731
        return either if name == "nan" else lambda x, y: ~either(x, y)
    if name.endswith("u") and name[:-1] in _COMPARE:
        base = _COMPARE[name[:-1]]
        return lambda x, y: base(x, y) | np.isnan(x) | np.isnan(y)
    base = _COMPARE[name]
    if is_float and name == "ne":
        return lambda x, y: (x != y) & ~np.isnan(x) & ~np.isnan(y)
    return base


@handler("setp")
def setp(m, ins, mods):
    """Comparison and Selection: setp, with an optional second destination and an optional predicate combined by and,
    or, xor."""
    from .floating import loader

    kind = mods.type()
    combine = mods.one(_BOOL)
    ftz = mods.flag("ftz")
    fn = comparison(ins, mods, kind)
    mods.done()
    ops = ins.operands
    first, second = (ops[0].first, ops[0].second) if isinstance(ops[0], ptx.Pair) else (ops[0], None)
    p = m.write(ins, first, "pred")
    q = m.write(ins, second, "pred") if second is not None else None
    a, b = (loader(m, ins, o, kind, ftz) for o in ops[1:3])
    c = read_pred(m, ins, ops[3]) if combine else None

    def run(f):
        t = fn(a(f), b(f))
        if c is None:
            p[f.sel] = t
            if q is not None:
                q[f.sel] = ~t
            return
        other = c(f)
        r = _BOOL[combine](t, other)
        if q is not None:
            q[f.sel] = _BOOL[combine](~t, other)
        p[f.sel] = r

    return run


@handler("set")
def set_(m, ins, mods):
    """Comparison and Selection: set: integer all-ones or float 1.0 where the comparison holds."""
    from .floating import loader

    kind, out = mods.type(), mods.type()
    ftz = mods.flag("ftz")
    if mods.one(_BOOL):
        raise unsupported(ins, "set with a combining predicate")
    fn = comparison(ins, mods, kind)
    mods.done()
    d = m.write(ins, ins.operands[0], out)
    a, b = (loader(m, ins, o, kind, ftz) for o in ins.operands[1:3])

    def run(f):
        t = fn(a(f), b(f))
        d[f.sel] = (
            t.astype(np.float32) if out == "f32" else np.where(t, d.dtype.type(0) - d.dtype.type(1), d.dtype.type(0))
        )

    return run


@handler("selp")
def selp(m, ins, mods):
    """Comparison and Selection: selp."""
    kind = mods.type()
    mods.done()
    d = m.write(ins, ins.operands[0], kind)
    a, b = (m.read(ins, o, kind) for o in ins.operands[1:3])
    c = m.read(ins, ins.operands[3], "pred")

    def run(f):
        s = f.sel
        d[s] = np.where(c[s], a[s], b[s])

    return run


@handler("slct")
def slct(m, ins, mods):
    """Comparison and Selection: slct: by the sign of the third operand."""
    by, kind = mods.type(), mods.type()
    mods.done()
    d = m.write(ins, ins.operands[0], kind)
    a, b = (m.read(ins, o, kind) for o in ins.operands[1:3])
    c = m.read(ins, ins.operands[3], by)

    def run(f):
        s = f.sel
        d[s] = np.where(c[s] >= 0, a[s], b[s])

    return run
