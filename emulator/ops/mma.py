"""Warp matrix instructions (PTX ISA, "Warp Level Matrix Multiply-Accumulate Instructions"): mma.sync, ldmatrix,
stmatrix, movmatrix.

Fragment layouts are the figures of the manual ("Matrix fragments for mma.m16n8k..."): group = lane / 4, member =
lane % 4. Arithmetic: hw.numerics (exact products, aligned and truncated fp32 accumulation over the K of one
instruction).
"""

import numpy as np

from ..bind import handler, unsupported
from ..hw import numerics
from ..engine import PARK
from .data import Access

LANE = np.arange(32)
GROUP, MEMBER = LANE >> 2, LANE & 3


def _fragment(k, bits):
    """Index arrays for A (row, col), B (k, n) and C (row, col), each [32 lanes, elements in register order]."""
    if bits == 16:
        i = np.arange(k // 2)
        a = (GROUP[:, None] + 8 * (i >> 1 & 1), 2 * MEMBER[:, None] + (i & 1) + 8 * (i >> 2))
        i = np.arange(k // 4)
        b = (2 * MEMBER[:, None] + (i & 1) + 8 * (i >> 1), GROUP[:, None] + 0 * i)
    else:
        i = np.arange(k // 2)
        a = (GROUP[:, None] + 8 * (i & 1), MEMBER[:, None] + 4 * (i >> 1))
        i = np.arange(k // 4)
        b = (MEMBER[:, None] + 4 * i, GROUP[:, None] + 0 * i)
    i = np.arange(4)
    c = (GROUP[:, None] + 8 * (i >> 1), 2 * MEMBER[:, None] + (i & 1))
    return a, b, c


@handler("mma.sync")
def mma_sync(m, ins, mods):
    """Warp Level Matrix Multiply-Accumulate: mma.sync.aligned.m16n8k{4,8,16}: bf16, fp16 and tf32 operands, f32 (or
    f16) accumulators."""
    if not mods.flag("aligned"):
        raise unsupported(ins, "mma.sync without .aligned")
    shape = mods.need(("m16n8k16", "m16n8k8", "m16n8k4"), "mma shape")
    mods.need(("row",), "A layout"), mods.need(("col",), "B layout")
    types = list(mods.left)
    mods.left = []
    if len(types) != 4 or types[0] != types[3] or types[0] not in ("f32", "f16") or types[1] != types[2]:
        raise unsupported(ins, f"mma types {'.'.join(types)}")
    out, kind = types[0], types[1]
    k = int(shape.split("k")[1])
    bits = {"bf16": 16, "f16": 16, "tf32": 32}.get(kind)
    if bits is None or (bits == 16 and k == 4) or (bits == 32 and k == 16) or (out == "f16" and kind != "f16"):
        raise unsupported(ins, f"mma.{shape} with .{kind} and .{out} accumulators")
    (ar, ac), (br, bc), (cr, cc) = _fragment(k, bits)
    regs = [[m.read(ins, o, "b32") for o in op.items] for op in ins.operands[1:4]]
    want = (k * bits // 64, k * bits // 128, 4 if out == "f32" else 2)
    if tuple(map(len, regs)) != want:
        raise unsupported(ins, f"{[len(r) for r in regs]} registers, {want} expected")
    dst = [m.write(ins, o, "b32") for o in ins.operands[0].items]
    raw = np.uint16 if bits == 16 else np.uint32
    cdtype = np.float32 if out == "f32" else np.float16

    def matrix(f, arrays, at, shape, dtype):
        x = np.stack([a[f.sel] for a in arrays], 1).view(dtype)  # [lanes, elements]
        full = np.empty((f.n // 32, *shape), dtype)
        full[:, at[0], at[1]] = x.reshape(-1, 32, x.shape[1])
        return full

    def run(f):
        if not f.whole:
            return PARK
        a = numerics.widen(matrix(f, regs[0], (ar, ac), (16, k), raw), kind)
        b = numerics.widen(matrix(f, regs[1], (br, bc), (k, 8), raw), kind)
        c = matrix(f, regs[2], (cr, cc), (16, 8), cdtype)
        d = numerics.dot_accumulate(a, b, c, kind, out=out).astype(cdtype)
        flat = np.ascontiguousarray(d[:, cr, cc].reshape(f.n, 4)).view(np.uint32)
        for i, r in enumerate(dst):
            r[f.sel] = flat[:, i]
        return None

    return run


def _matrix_mods(ins, mods):
    mods.flag("sync"), mods.flag("aligned")
    if not mods.flag("m8n8"):
        raise unsupported(ins, "matrix shapes other than .m8n8")
    count = int(mods.need(("x1", "x2", "x4"), "matrix count")[1])
    trans = mods.flag("trans")
    mods.one(("shared", "shared::cta"))
    if mods.type() != "b16":
        raise unsupported(ins, "matrix elements other than .b16")
    mods.done()
    return count, trans


@handler("ldmatrix")
def ldmatrix(m, ins, mods):
    """Warp Level Matrix Multiply-Accumulate: ldmatrix.sync.aligned.m8n8.{x1,x2,x4}{.trans}.shared.b16: row r of
    matrix i is at lane 8 i + r's address."""
    count, trans = _matrix_mods(ins, mods)
    access, address = Access(m, ins, "shared", 8, 2), m.address(ins, ins.operands[1], "shared")
    dst = [m.write(ins, o, "b32") for o in getattr(ins.operands[0], "items", (ins.operands[0],))]

    def run(f):
        if not f.whole:
            return PARK
        g = f if count == 4 else f.where((f.lanes & 31) < 8 * count)
        x = access.load(g, address(g)).view(np.uint16).reshape(-1, count, 8, 8)
        if trans:
            x = np.ascontiguousarray(x.swapaxes(2, 3))
        x = x.view(np.uint32).reshape(-1, count, 32)
        for i, d in enumerate(dst):
            d[f.sel] = x[:, i].reshape(-1)
        return None

    return run


@handler("stmatrix")
def stmatrix(m, ins, mods):
    """Warp Level Matrix Multiply-Accumulate: stmatrix.sync.aligned.m8n8.{x1,x2,x4}{.trans}.shared.b16: the inverse
    of ldmatrix."""
    count, trans = _matrix_mods(ins, mods)
    access, address = Access(m, ins, "shared", 8, 2), m.address(ins, ins.operands[0], "shared")
    src = [m.read(ins, o, "b32") for o in getattr(ins.operands[1], "items", (ins.operands[1],))]

    def run(f):
        if not f.whole:
            return PARK
        x = np.stack([a[f.sel].reshape(-1, 32) for a in src], 1)  # [warps, matrices, 32]
        x = x.view(np.uint16).reshape(-1, count, 8, 8)
        if trans:
            x = np.ascontiguousarray(x.swapaxes(2, 3))
        rows = np.ascontiguousarray(x).view(np.uint64).reshape(-1, 2)  # one row of 16 bytes per address
        g = f if count == 4 else f.where((f.lanes & 31) < 8 * count)
        access.store(g, address(g), [rows[:, 0], rows[:, 1]])
        return None

    return run


@handler("movmatrix")
def movmatrix(m, ins, mods):
    """Warp Level Matrix Multiply-Accumulate: movmatrix.sync.aligned.m8n8.trans.b16."""
    mods.flag("sync"), mods.flag("aligned")
    mods.need(("m8n8",), "shape"), mods.need(("trans",), "movmatrix"), mods.need(("b16",), "type")
    mods.done()
    d, a = m.write(ins, ins.operands[0], "b32"), m.read(ins, ins.operands[1], "b32")

    def run(f):
        if not f.whole:
            return PARK
        x = np.ascontiguousarray(a[f.sel]).view(np.uint16).reshape(-1, 8, 8).swapaxes(1, 2)
        d[f.sel] = np.ascontiguousarray(x).view(np.uint32).reshape(-1)
        return None

    return run
