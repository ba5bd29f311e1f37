"""PTX ISA, "Floating-Point", "Half Precision" and "Mixed Precision Floating-Point Instructions", packed f32x2,
f16x2, bf16x2, and the opcodes shared with integers (add, sub, mul, mad, min, max, abs, neg, div).

Rounding is exact for every mode. Approximate functions are computed in float64 and rounded to nearest, which lies
within the errors the manual documents (ex2.approx 2 ulp, lg2, rcp, rsqrt, sqrt, sin, cos, tanh 2^-11 relative ...):
hardware's own last bits differ. NaN results keep numpy's payload, except where a format conversion makes them
canonical.
"""

import numpy as np

from .. import floats
from ..bind import handler, unsupported
from . import integer

F64 = np.float64
ROUND = ("rn", "rz", "rm", "rp")
HALVES = ("f16", "bf16", "f16x2", "bf16x2")
FLOATS = ("f32", "f64", "f32x2", *HALVES)
_LOAD16 = {"f16": lambda b: b.view(np.float16).astype(F64), "bf16": lambda b: floats.bf16_to_f32(b).astype(F64)}
_STORE16 = {"f16": floats.to_f16, "bf16": floats.f64_to_bf16}


def loader(m, ins, op, kind, ftz=False):
    """Function fragment -> values to compute with: float32 for f32 and f32x2 ([n, 2]), float64 for f64 and halves."""
    if kind == "f32x2":
        a = m.pair(ins, op)
    elif kind in ("f16x2", "bf16x2"):
        a = np.ascontiguousarray(m.read(ins, op, "b32")).view(np.uint16).reshape(m.lanes, 2)
    else:
        a = m.read(ins, op, "b16" if kind in HALVES else kind)
    if kind in HALVES:
        decode = _LOAD16[kind.removesuffix("x2")]
        return lambda f: decode(np.ascontiguousarray(a[f.sel]))
    if ftz:
        return lambda f: floats.flush(a[f.sel])
    return lambda f: a[f.sel]


def storer(m, ins, op, kind, ftz=False, sat=False, relu=False):
    """Function (fragment, values) that rounds to nearest (where the values are wider) and writes the destination."""
    if kind in ("f16x2", "bf16x2"):
        d = m.write(ins, op, "b32").view(np.uint16).reshape(m.lanes, 2)
    elif kind == "f32x2":
        d = m.pair(ins, op, write=True)
    else:
        d = m.write(ins, op, "b16" if kind in HALVES else kind)
    encode = _STORE16[kind.removesuffix("x2")] if kind in HALVES else None

    def store(f, x):
        if ftz:
            x = floats.flush(x)
        if sat:
            x = np.where(np.isnan(x), x.dtype.type(0), np.clip(x, 0, 1))
        if relu:
            x = np.where(x < 0, x.dtype.type(0), x)
        d[f.sel] = encode(x) if encode else x

    return store


def _float(m, ins, mods, kind, count, fn):
    """Shape of most float instructions: modifiers ftz, sat, relu and a rounding mode; fn(values..., mode)."""
    mode, ftz, sat, relu = mods.one(ROUND, "rn"), mods.flag("ftz"), mods.flag("sat"), mods.flag("relu")
    mods.done()
    if mode != "rn" and kind not in ("f32", "f32x2", "f64") or mode != "rn" and kind == "f64":
        raise unsupported(ins, f"rounding .{mode} for .{kind}")
    load = [loader(m, ins, o, kind, ftz) for o in ins.operands[1 : 1 + count]]
    store = storer(m, ins, ins.operands[0], kind, ftz, sat, relu)
    if count == 1:
        (a,) = load
        return lambda f: store(f, fn(a(f), mode))
    if count == 2:
        a, b = load
        return lambda f: store(f, fn(a(f), b(f), mode))
    a, b, c = load
    return lambda f: store(f, fn(a(f), b(f), c(f), mode))


def _add_for(kind, sign=1):
    def add(x, y, mode):
        y = y if sign > 0 else -y
        if kind in HALVES:
            return floats.odd_sum(x, y)
        return x + y if mode == "rn" else floats.to_f32(floats.odd_sum(x.astype(F64), y.astype(F64)), mode)

    return add


def _mul(x, y, mode):
    if mode == "rn" or x.dtype == F64:
        return x * y
    return floats.to_f32(x.astype(F64) * y.astype(F64), mode)


def _fma_for(kind):
    def fma(x, y, z, mode):
        if kind in HALVES:
            return floats.odd_sum(x * y, z)
        return floats.fma_f64(x, y, z) if kind == "f64" else floats.fma_f32(x, y, z, mode)

    return fma


def _mixed(m, ins, mods, kind, count, fn):
    """Mixed Precision Floating-Point: the first count-1 sources are f16 or bf16 and widen exactly, the last source
    and result are f32."""
    mods.flag("f32")
    mode, sat = mods.one(ROUND, "rn"), mods.flag("sat")
    mods.done()
    load = [loader(m, ins, o, kind) for o in ins.operands[1:count]] + [loader(m, ins, ins.operands[count], "f32")]
    store = storer(m, ins, ins.operands[0], "f32", False, sat)
    return lambda f: store(f, fn(*(x(f).astype(np.float32) for x in load), mode))


def _is_mixed(mods, kind):
    return kind in ("f16", "bf16") and "f32" in mods.left


@handler("add")
def add(m, ins, mods):
    """Integer Arithmetic / Floating-Point / Half Precision Floating-Point: add; Mixed Precision Floating-Point:
    add.f32.{f16,bf16}."""
    kind = mods.type()
    if _is_mixed(mods, kind):
        return _mixed(m, ins, mods, kind, 2, _add_for("f32"))
    if kind in FLOATS:
        return _float(m, ins, mods, kind, 2, _add_for(kind))
    return integer.int_add_sub(m, ins, mods, kind, np.add)


@handler("sub")
def sub(m, ins, mods):
    """Integer Arithmetic / Floating-Point / Half Precision Floating-Point: sub; Mixed Precision Floating-Point:
    sub.f32.{f16,bf16}."""
    kind = mods.type()
    if _is_mixed(mods, kind):
        return _mixed(m, ins, mods, kind, 2, _add_for("f32", -1))
    if kind in FLOATS:
        return _float(m, ins, mods, kind, 2, _add_for(kind, -1))
    return integer.int_add_sub(m, ins, mods, kind, np.subtract)


@handler("mul")
def mul(m, ins, mods):
    """Integer Arithmetic / Floating-Point / Half Precision Floating-Point: mul."""
    kind = mods.type()
    return _float(m, ins, mods, kind, 2, _mul) if kind in FLOATS else integer.int_mul(m, ins, mods, kind)


@handler("fma")
def fma(m, ins, mods):
    """Floating-Point / Half Precision Floating-Point: fma: one rounding; Mixed Precision Floating-Point:
    fma.f32.{f16,bf16}."""
    kind = mods.type()
    if _is_mixed(mods, kind):
        return _mixed(m, ins, mods, kind, 3, _fma_for("f32"))
    if kind not in FLOATS:
        raise unsupported(ins, f"fma.{kind} is not modelled")
    return _float(m, ins, mods, kind, 3, _fma_for(kind))


@handler("mad")
def mad(m, ins, mods):
    """Integer Arithmetic: mad; Floating-Point: mad.f32 is a fused multiply-add on every target modelled here."""
    kind = mods.type()
    if kind == "f32":
        return _float(m, ins, mods, kind, 3, _fma_for(kind))
    if kind in FLOATS:
        raise unsupported(ins, f"mad.{kind} is not modelled")
    return integer.int_mad(m, ins, mods, kind)


def _min_max(ins, mods, kind, largest):
    nan, xorsign = mods.flag("NaN"), mods.flag("xorsign")
    mods.flag("abs") if xorsign else None

    def pick(x, y, mode):
        sign = np.signbit(x) ^ np.signbit(y)
        if xorsign:
            x, y = np.abs(x), np.abs(y)
        # -0 < +0 (manual); numpy's comparison does not order zeros
        x_first = (x > y) | ((x == y) & ~np.signbit(x)) if largest else (x < y) | ((x == y) & np.signbit(x))
        r = np.where(x_first | np.isnan(y), x, y)
        if nan:
            r = np.where(np.isnan(x) | np.isnan(y), x.dtype.type(np.nan), r)
        return np.where(sign, -np.abs(r), np.abs(r)) if xorsign else r

    return pick


def _extreme(m, ins, mods, largest):
    kind = mods.type()
    if kind in FLOATS:
        fn = _min_max(ins, mods, kind, largest)
        if len(ins.operands) == 4:
            return _float(m, ins, mods, kind, 3, lambda x, y, z, mode: fn(fn(x, y, mode), z, mode))
        return _float(m, ins, mods, kind, 2, fn)
    if mods.flag("relu"):
        raise unsupported(ins, "integer min/max with .relu")
    mods.done()
    if kind in ("u16x2", "s16x2"):
        raise unsupported(ins, "packed integer min/max")
    return integer.binary(m, ins, kind, np.maximum if largest else np.minimum)


@handler("min")
def min_(m, ins, mods):
    """Integer Arithmetic / Floating-Point / Half Precision Floating-Point: min: the number if one operand is NaN,
    unless .NaN."""
    return _extreme(m, ins, mods, False)


@handler("max")
def max_(m, ins, mods):
    """Integer Arithmetic / Floating-Point / Half Precision Floating-Point: max."""
    return _extreme(m, ins, mods, True)


_SIGN = {
    "f16": ("u16", 0x8000),
    "bf16": ("u16", 0x8000),
    "f16x2": ("u32", 0x80008000),
    "bf16x2": ("u32", 0x80008000),
    "f32": ("u32", 0x80000000),
    "f64": ("u64", 1 << 63),
}


def _sign_op(m, ins, mods, fn):
    kind, ftz = mods.type(), mods.flag("ftz")
    mods.done()
    if kind in _SIGN:
        if ftz and kind != "f32":
            raise unsupported(ins, f".ftz for .{kind}")
        t, bit = _SIGN[kind]
        d, a = m.write(ins, ins.operands[0], t), m.read(ins, ins.operands[1], t)
        bit = d.dtype.type(bit)

        def run(f):
            x = a[f.sel]
            if ftz:
                x = np.ascontiguousarray(floats.flush(x.view(np.float32))).view(np.uint32)
            d[f.sel] = x ^ bit if fn is np.negative else x & ~bit

        return run
    return integer.unary(m, ins, kind, fn)


@handler("neg")
def neg(m, ins, mods):
    """Integer Arithmetic / Floating-Point / Half Precision Floating-Point: neg."""
    return _sign_op(m, ins, mods, np.negative)


@handler("abs")
def abs_(m, ins, mods):
    """Integer Arithmetic / Floating-Point / Half Precision Floating-Point: abs."""
    return _sign_op(m, ins, mods, np.abs)


@handler("copysign")
def copysign(m, ins, mods):
    """Floating-Point: copysign: sign of a, magnitude of b."""
    kind = mods.type()
    mods.done()
    return integer.binary(m, ins, kind, lambda x, y: np.copysign(y, x))


@handler("testp")
def testp(m, ins, mods):
    """Floating-Point: testp."""
    kind = mods.type()
    tests = {
        "finite": np.isfinite,
        "infinite": np.isinf,
        "number": lambda x: ~np.isnan(x),
        "notanumber": np.isnan,
        "normal": lambda x: np.isfinite(x) & (np.abs(x) >= np.finfo(x.dtype).tiny),
        "subnormal": lambda x: (x != 0) & (np.abs(x) < np.finfo(x.dtype).tiny),
    }
    fn = tests[mods.need(tests, "testp")]
    mods.done()
    p, a = m.write(ins, ins.operands[0], "pred"), m.read(ins, ins.operands[1], kind)

    def run(f):
        p[f.sel] = fn(a[f.sel])

    return run


@handler("div")
def div(m, ins, mods):
    """Integer Arithmetic / Floating-Point: div: .approx and .full (2 ulp) are computed correctly rounded."""
    kind = mods.type()
    if kind not in FLOATS:
        mods.done()
        return integer.binary(m, ins, kind, integer.int_divide)
    mods.one(("approx", "full"))

    def divide(x, y, mode):
        if mode != "rn":
            raise unsupported(ins, f"div.{mode}")
        return x / y

    return _float(m, ins, mods, kind, 2, divide)


def _function(fn):
    """Unary function computed in float64 and rounded once; .approx or a rounding mode."""

    def make(m, ins, mods):
        kind = mods.type()
        mods.one(("approx",))

        def apply(x, mode):
            r = fn(x.astype(F64))
            return r if x.dtype == F64 else floats.to_f32(r, mode)

        return _float(m, ins, mods, kind, 1, apply)

    return make


_FUNCTIONS = {
    "rcp": ("Floating-Point: rcp (approx: 1 ulp; rn correctly rounded)", lambda x: 1 / x),
    "sqrt": ("Floating-Point: sqrt (approx: relative error 2^-23; rn correctly rounded)", np.sqrt),
    "rsqrt": ("Floating-Point: rsqrt.approx (relative error 2^-22.9)", lambda x: 1 / np.sqrt(x)),
    "sin": ("Floating-Point: sin.approx (absolute error 2^-20.5 in [-pi, pi])", np.sin),
    "cos": ("Floating-Point: cos.approx (absolute error 2^-20.5 in [-pi, pi])", np.cos),
    "lg2": ("Floating-Point: lg2.approx (absolute error 2^-22)", np.log2),
    "ex2": ("Floating-Point / Half Precision Floating-Point: ex2.approx (2 ulp; halves 2^-9.9, 2^-7)", np.exp2),
    "tanh": ("Floating-Point / Half Precision Floating-Point: tanh.approx (relative error 2^-11)", np.tanh),
}
for _name, (_doc, _fn) in _FUNCTIONS.items():
    _make = _function(_fn)
    _make.__doc__, _make.__name__ = _doc + ".", _name
    handler(_name)(_make)
