"""PTX ISA, "Data Movement and Conversion Instructions": cvt: integers, f16, bf16, f32, f64, tf32, packed halves; all
rounding modes."""

import numpy as np

from .. import floats
from ..bind import handler, unsupported
from .floating import loader

_INT_ROUND = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
_MODES = ("rn", "rz", "rm", "rp", "rna", "rs")
_FLOATS = ("f16", "bf16", "f32", "f64", "tf32", "f16x2", "bf16x2")


@handler("cvt")
def cvt(m, ins, mods):
    """Data Movement and Conversion: cvt.dtype.atype. Packed destinations take two f32: the first goes to the upper
    half."""
    src, dst = mods.type(), mods.type()
    mode, integral = mods.one(_MODES), mods.one(_INT_ROUND)
    ftz, sat, relu, satfinite = mods.flag("ftz"), mods.flag("sat"), mods.flag("relu"), mods.flag("satfinite")
    mods.done()
    if satfinite or mode == "rs":
        raise unsupported(ins, "cvt with .satfinite or .rs is not modelled")
    if dst in ("f16x2", "bf16x2"):
        return _packed(m, ins, dst, mode or "rn", relu)
    if src in ("f16x2", "bf16x2", "f32x2", "tf32"):
        raise unsupported(ins, f"cvt from .{src}")
    src_float, dst_float = src in _FLOATS, dst in _FLOATS
    if not src_float and not dst_float:
        return _int_to_int(m, ins, dst, src, sat)
    if src_float and not dst_float:
        return _float_to_int(m, ins, dst, src, integral, ftz)
    if not src_float:
        return _int_to_float(m, ins, dst, src, mode or "rn")
    return _float_to_float(m, ins, dst, src, mode, integral, ftz, sat, relu)


def _int_to_int(m, ins, dst, src, sat):
    d, a = m.write(ins, ins.operands[0], dst, wide=True), m.read(ins, ins.operands[1], src, wide=True)
    narrow = np.dtype(f"{'i' if dst[0] == 's' else 'u'}{int(dst[1:]) // 8}")
    info = np.iinfo(narrow)

    def run(f):
        x = a[f.sel]
        if sat:
            lo, hi = max(info.min, np.iinfo(x.dtype).min), min(info.max, np.iinfo(x.dtype).max)
            x = np.clip(x, x.dtype.type(lo), x.dtype.type(hi))
        d[f.sel] = x.astype(narrow)

    return run


def _float_to_int(m, ins, dst, src, integral, ftz):
    """Out of range saturates; NaN gives 0 for f32 sources up to 32 bits (manual), the type's minimum bit pattern
    otherwise."""
    if integral is None:
        raise unsupported(ins, "a float to integer cvt needs .rni, .rzi, .rmi or .rpi")
    load, d = loader(m, ins, ins.operands[1], src, ftz), m.write(ins, ins.operands[0], dst, wide=True)
    narrow = np.dtype(f"{'i' if dst[0] == 's' else 'u'}{int(dst[1:]) // 8}")
    info = np.iinfo(narrow)
    nan = (
        narrow.type(0) if src != "f64" else narrow.type(-(1 << 63) if dst == "s64" else 1 << 63 if dst == "u64" else 0)
    )

    def run(f):
        x = _INT_ROUND[integral](load(f).astype(np.float64))
        big, small = x >= float(info.max), x <= float(info.min)
        r = np.where(big | small | np.isnan(x), 0, x).astype(narrow)
        r = np.where(big, narrow.type(info.max), np.where(small, narrow.type(info.min), r))
        d[f.sel] = np.where(np.isnan(x), nan, r)

    return run


def _int_to_float(m, ins, dst, src, mode):
    a = m.read(ins, ins.operands[1], src, wide=True)
    d = m.write(ins, ins.operands[0], "b16" if dst in ("f16", "bf16") else dst)
    wide = a.dtype.itemsize == 8

    def run(f):
        x = a[f.sel]
        if wide and (dst != "f32" or mode != "rn"):
            if (np.abs(x.astype(np.float64)) >= 2.0**53).any():
                raise unsupported(ins, "64-bit integers beyond 2^53 to float with this type or rounding")
        if dst == "f32":
            d[f.sel] = x.astype(np.float32) if mode == "rn" else floats.to_f32(x.astype(np.float64), mode)
        elif dst == "f64":
            d[f.sel] = x.astype(np.float64)
        elif dst == "f16":
            d[f.sel] = floats.to_f16(x.astype(np.float64), mode)
        else:
            d[f.sel] = floats.f64_to_bf16(x.astype(np.float64), mode)

    return run


def _float_to_float(m, ins, dst, src, mode, integral, ftz, sat, relu):
    load = loader(m, ins, ins.operands[1], src, ftz)
    d = m.write(ins, ins.operands[0], "b16" if dst in ("f16", "bf16") else "b32" if dst == "tf32" else dst)

    def run(f):
        x = load(f)
        if integral:
            x = _INT_ROUND[integral](x)
        if sat:
            x = np.where(np.isnan(x), x.dtype.type(0), np.clip(x, 0, 1))
        if relu:
            x = _relu(x)
        if dst == "tf32":
            y = floats.to_tf32(x, mode or "rna")
            # NaN is cut like any number, which may leave an infinity: measured on an H200 with .rna
            d[f.sel] = np.where(np.isnan(x), x.view(np.uint32) & np.uint32(0xFFFFE000), y)
        elif dst == "f32":
            r = floats.to_f32(x, mode or "rn") if x.dtype == np.float64 else x
            d[f.sel] = floats.flush(r) if ftz else r
        elif dst == "f64":
            d[f.sel] = x
        elif dst == "f16":
            d[f.sel] = floats.to_f16(x, mode or "rn")
        else:
            d[f.sel] = (
                floats.f32_to_bf16(x, mode or "rn") if x.dtype == np.float32 else floats.f64_to_bf16(x, mode or "rn")
            )

    return run


def _relu(x):
    """Negative numbers to zero, and -0 to +0: measured on an H200."""
    return np.where(x <= 0, x.dtype.type(0), x)


def _packed(m, ins, dst, mode, relu):
    d = m.write(ins, ins.operands[0], "b32").view(np.uint16).reshape(m.lanes, 2)
    if len(ins.operands) != 3:
        raise unsupported(ins, "packed cvt with other than two f32 sources")
    high, low = (m.read(ins, o, "f32") for o in ins.operands[1:3])
    encode = floats.f32_to_bf16 if dst == "bf16x2" else floats.to_f16

    def run(f):
        s = f.sel
        for k, a in ((1, high), (0, low)):
            x = a[s]
            if relu:
                x = _relu(x)
            d[s, k] = encode(x, mode)

    return run
