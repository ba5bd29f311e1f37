"""cp.async.bulk.tensor: boxes of 1 to 5 dimensions, swizzles, edges and fills (PTX ISA, "Tensors" and cp.async.bulk.tensor).

A load writes the box to shared memory, which goes out raw; a store takes the box from shared memory, filled with numbers by
ordinary stores, to a tensor that held zeros. The expected bytes come from a loop over the elements of the box.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np

from .copies import INIT, WAIT
from .program import Map, Program, generator, kernel

SIZE = {"bf16": 2, "f16": 2, "f32": 4, "u8": 1, "u16": 2, "u32": 4, "f64": 8}
UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def swizzled(at: int, mode: str) -> int:
    """Shared address of byte `at`: the 16-byte unit's number within a row is XORed with the row's number. Rows of 128 bytes;
    eight of them cycle with 128B, with 64B two rows share a number and four cycle, with 32B four share and two cycle."""
    row, unit = at // 128, at // 16 % 8
    unit ^= {"none": 0, "32B": row % 2, "64B": row % 4, "128B": row % 8}[mode]
    return row * 128 + unit * 16 + at % 16


def elements(m: Map, coords: tuple[int, ...], store: bool = False):
    """(byte in shared memory, index in the tensor or None where out of bounds) of the box's elements; innermost first.
    A store writes 16 bytes of a row or none (measured)."""
    strides, size = (SIZE[m.dtype], *m.byte_strides), SIZE[m.dtype]
    dims = (-(-m.dims[0] * size // 16) * 16 // size, *m.dims[1:]) if store else m.dims
    for n, at in enumerate(itertools.product(*(range(b) for b in reversed(m.box)))):
        index = [c + i for c, i in zip(coords, reversed(at), strict=True)]
        inside = all(0 <= i < d for i, d in zip(index, dims, strict=True))
        yield swizzled(n * size, m.swizzle), sum(i * s for i, s in zip(index, strides, strict=True)) // size if inside else None


def fill_bits(m: Map) -> int:
    """Zeros, or 0x7ff7 in every 16 bits (the manual says NaN; these bits were measured on an H200)."""
    return 0 if m.fill == "zero" else int.from_bytes(b"\x7f\xf7" * (SIZE[m.dtype] // 2))


def _tensor(name: str, m: Map) -> np.ndarray:
    size = SIZE[m.dtype]
    n = (sum((d - 1) * s for d, s in zip(m.dims, (size, *m.byte_strides), strict=True)) + size + 15) // 16 * 16
    return generator(name).integers(0, 256, n).astype(np.uint8)


def _name(kind: str, m: Map, coords: tuple[int, ...]) -> str:
    box, at = "x".join(map(str, m.box)), ",".join(map(str, coords))
    return f"cp.async.bulk.tensor.{len(m.dims)}d {kind} {m.dtype} box {box} at {at} swizzle {m.swizzle} fill {m.fill}"


def _coordinates(coords: tuple[int, ...]) -> tuple[str, str]:
    return "".join(f"mov.b32 %r{20 + i}, {c};" for i, c in enumerate(coords)), ", ".join(
        f"%r{20 + i}" for i in range(len(coords))
    )


def load(dims, box, coords, dtype="bf16", swizzle="none", fill="zero", strides=None, hint=False) -> Program:
    """hint: in the form of the rungs, with a cache hint and the CTA's own shared memory as destination."""
    m = Map("x", dims, box, dtype, swizzle, fill, strides)
    name, nbytes = _name("load", m, coords) + (" hint" if hint else ""), int(np.prod(box)) * SIZE[dtype]

    def manual(inputs):
        x, size = inputs["x"].view(UNSIGNED[SIZE[dtype]]), SIZE[dtype]
        y = np.zeros(nbytes // size, x.dtype)
        for at, index in elements(m, coords):
            y[at // size] = fill_bits(m) if index is None else x[index]
        return {"y": y.view(np.uint32)}

    space = "shared::cta" if hint else "shared::cluster"
    op = f"cp.async.bulk.tensor.{len(dims)}d.{space}.global.tile.mbarrier::complete_tx::bytes"
    setup, c = _coordinates(coords)
    tail, by, policy = "", "", ""
    if hint:
        tail, by, policy = ".L2::cache_hint", ", %rd8", "createpolicy.fractional.L2::evict_last.b64 %rd8, 1.0;"
    body = f"""{INIT} {setup} {policy} @!%p1 bra GO;
mbarrier.arrive.expect_tx.shared.b64 _, [%bar], {nbytes};
{op}{tail} [%smem], [%map, {{{c}}}], [%bar]{by};
GO: bar.warp.sync -1; {WAIT.format(n=1, bar="%bar", parity=0)}
mov.b32 %r1, %t; COPY: setp.ge.u32 %p2, %r1, {nbytes // 4}; @%p2 bra END; mad.lo.u32 %r2, %r1, 4, %smem; ld.shared.u32 %r3, [%r2];
mad.wide.u32 %rd1, %r1, 4, %y; st.global.u32 [%rd1], %r3; add.u32 %r1, %r1, 32; bra COPY; END:"""
    text = kernel(body, ["x", "y"], maps=("map",), shared=max(nbytes, 1024))
    return Program(name, text, {"x": _tensor(name, m)}, {"y": ((nbytes // 4,), np.uint32)}, manual, maps={"map": m})


def store(dims, box, coords, dtype="bf16", swizzle="none", strides=None, hint=False) -> Program:
    """Word i of shared memory holds i * 0x10001 + 1, so that no two halves are zero."""
    m = Map("y", dims, box, dtype, swizzle, "zero", strides)
    name, nbytes = _name("store", m, coords) + (" hint" if hint else ""), int(np.prod(box)) * SIZE[dtype]
    room = len(_tensor(name, m))

    def manual(inputs):
        held = (np.arange(nbytes // 4, dtype=np.uint32) * np.uint32(0x10001) + np.uint32(1)).view(UNSIGNED[SIZE[dtype]])
        y = np.zeros(room // SIZE[dtype], held.dtype)
        for at, index in elements(m, coords, store=True):
            if index is not None:
                y[index] = held[at // SIZE[dtype]]
        return {"y": y.view(np.uint8)}

    op, by, policy = f"cp.async.bulk.tensor.{len(dims)}d.global.shared::cta.tile.bulk_group", "", ""
    if hint:
        op, by, policy = op + ".L2::cache_hint", ", %rd8", "createpolicy.fractional.L2::evict_first.b64 %rd8, 1.0;"
    setup, c = _coordinates(coords)
    body = f"""setp.eq.u32 %p1, %t, 0; {setup} {policy}
mov.b32 %r1, %t; FILL: setp.ge.u32 %p2, %r1, {nbytes // 4}; @%p2 bra FULL; mad.lo.u32 %r2, %r1, 4, %smem;
mad.lo.u32 %r3, %r1, 0x10001, 1;
st.shared.u32 [%r2], %r3; add.u32 %r1, %r1, 32; bra FILL; FULL: fence.proxy.async.shared::cta; bar.warp.sync -1; @!%p1 bra END;
{op} [%map, {{{c}}}], [%smem]{by};
cp.async.bulk.commit_group; cp.async.bulk.wait_group 0; END:"""
    text = kernel(body, ["y"], maps=("map",), shared=max(nbytes, 1024))
    return Program(name, text, {}, {"y": ((room,), np.uint8)}, manual, maps={"map": m})


# dims, box, coordinates, dtype, swizzle: inside, and over each edge. Swizzled rows are as wide as the swizzle, as in the rungs.
# Coordinates may be negative in a load; the inner one is a multiple of 16 bytes.
BOXES = (
    ((64,), (64,), (0,), "bf16", "none"), ((1000,), (128,), (960,), "bf16", "none"), ((64,), (32,), (-8,), "f32", "none"),
    ((64, 16), (64, 8), (0, 4), "bf16", "128B"), ((128, 24), (64, 16), (64, 0), "bf16", "128B"),
    ((96, 20), (64, 8), (64, 15), "bf16", "128B"),
    ((40, 20), (32, 8), (16, 15), "bf16", "64B"), ((64, 20), (32, 16), (32, 0), "f16", "64B"),
    ((64, 20), (16, 16), (-8, -2), "bf16", "32B"),
    ((64, 12), (32, 8), (0, 2), "f32", "128B"), ((64, 12), (16, 8), (48, 8), "f32", "64B"),
    ((64, 6, 3), (16, 4, 2), (32, 3, 2), "bf16", "32B"), ((64, 6, 3), (64, 4, 2), (0, -1, 1), "bf16", "128B"),
    ((32, 10, 2, 2), (16, 4, 1, 2), (-8, -2, 1, 0), "bf16", "none"),
    ((64, 2, 70, 2), (64, 1, 64, 1), (0, 1, 64, 1), "bf16", "128B"),
    ((16, 5, 3, 2, 3), (16, 2, 2, 1, 2), (0, 4, -1, 1, 2), "f32", "64B"),
    ((32, 3, 2, 2, 2), (32, 2, 2, 2, 1), (0, 1, 0, 0, 1), "bf16", "64B"),
    ((64, 8), (32, 8), (0, 0), "u8", "none"), ((64, 8), (16, 8), (8, 1), "u16", "32B"), ((17, 8), (4, 4), (14, 5), "f64", "32B"),
)  # fmt: skip
STORED = tuple((d, b, tuple(n - s // 2 if c < 0 else c for n, s, c in zip(d, b, cs, strict=True)), *rest)
               for d, b, cs, *rest in BOXES)  # fmt: skip
TAILS = (
    ((9, 8), (4, 4), (8, 1), "f64", "none"), ((13, 8), (8, 4), (8, 1), "f32", "32B"), ((19, 8), (16, 4), (8, 2), "u16", "none"),
    ((45, 8), (32, 4), (32, 3), "bf16", "64B"), ((35, 8), (16, 4), (32, 1), "u8", "none"), ((7, 8), (8, 4), (0, 1), "f32", "32B"),
)  # fmt: skip
"""Inner sizes that are no multiple of 16 bytes."""
ODD = (
    ((32, 10, 2, 2), (8, 4, 1, 2), (-4, -2, 1, 0), "bf16", "none"), ((64, 8), (16, 8), (3, 1), "u16", "32B"),
    ((17, 8), (4, 4), (1, 5), "f64", "32B"),
)  # fmt: skip
NEGATIVE = (
    ((64,), (32,), (-8,), "f32", "none"), ((64, 20), (16, 16), (-8, -2), "bf16", "32B"),
    ((64, 6, 3), (64, 4, 2), (0, -1, 1), "bf16", "128B"), ((16, 5, 3, 2, 3), (16, 2, 2, 1, 2), (0, 4, -1, 1, 2), "f32", "64B"),
)  # fmt: skip
"""Illegal instructions on an H200: an inner coordinate that is no multiple of 16 bytes, and a negative one in a store (the CUDA
Programming Guide forbids the latter)."""


def _strides(dims, dtype):
    """Dense, each rounded up to 16 bytes."""
    out, step = [], SIZE[dtype]
    for d in dims[:-1]:
        step = -(-step * d // 16) * 16
        out.append(step)
    return tuple(out)


PROGRAMS = [
    *(load(d, b, c, t, s, strides=_strides(d, t)) for d, b, c, t, s in BOXES),
    *(copy(d, b, c, t, s, strides=_strides(d, t)) for copy in (load, store) for d, b, c, t, s in TAILS),
    load((96, 20), (64, 8), (64, 15), "bf16", "128B", "nan"), load((64, 20), (16, 16), (-8, -2), "f16", "32B", "nan"),
    load((64, 12), (16, 8), (56, 8), "f32", "64B", "nan"),
    load((64, 2, 70, 2), (64, 1, 64, 1), (0, 1, 64, 1), "bf16", "128B", hint=True),
    store((64, 2, 70, 2), (64, 1, 64, 1), (0, 1, 64, 1), "bf16", "128B", hint=True),
    *(store(d, b, c, t, s, strides=_strides(d, t)) for d, b, c, t, s in STORED),
    *(replace(copy(d, b, c, t, s, strides=_strides(d, t)), manual=None, traps=True)
      for copy, boxes in ((load, ODD), (store, ODD + NEGATIVE)) for d, b, c, t, s in boxes),
]  # fmt: skip
