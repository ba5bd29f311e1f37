"""ldmatrix, stmatrix, movmatrix and mma.sync (PTX ISA, "Warp Level Matrix Multiply-Accumulate Instructions").

Layouts are loops over lanes, written from the manual's figures. Operands of the layout programs are small integers, whose
products and sums no order or precision changes; those of the accumulation programs span many exponents, and the manual leaves
their sum open: what the emulator is held to there is its own model of the tensor core (emulator/hw/numerics.py).
"""

from __future__ import annotations

import numpy as np

from .program import Bitwise, Program, generator, kernel

COPY_IN = """
mad.wide.u32 %rd1, %t, 16, %x; ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%rd1];
mad.lo.u32 %r5, %t, 16, %smem; st.shared.v4.b32 [%r5], {%r1, %r2, %r3, %r4}; bar.warp.sync -1;"""  # 512 bytes
COPY_OUT = """
bar.warp.sync -1; mad.lo.u32 %r5, %t, 16, %smem; ld.shared.v4.b32 {%r1, %r2, %r3, %r4}, [%r5];
mad.wide.u32 %rd1, %t, 16, %y; st.global.v4.b32 [%rd1], {%r1, %r2, %r3, %r4};"""
ROW_ADDRESS = "mad.wide.u32 %rd2, %t, 4, %rows; ld.global.u32 %r6, [%rd2]; add.u32 %r6, %smem, %r6;"


def registers(first: int, n: int) -> str:
    return ", ".join(f"%r{first + i}" for i in range(n))


def matrix_rows(name: str):
    """Byte offsets of 32 rows of 16 bytes, shuffled: lane 8 i + r gives the address of row r of matrix i."""
    return (16 * generator(name).permutation(32)).astype(np.uint32)


def held(lane: int, half: int, trans: bool) -> tuple[int, int]:
    """(row, column) of the element in a half of a lane's register: row lane / 4, columns 2 (lane % 4) and + 1."""
    row, col = lane // 4, 2 * (lane % 4) + half
    return (col, row) if trans else (row, col)


def load(count: int, trans: bool) -> Program:
    name = f"ldmatrix.sync.aligned.m8n8.x{count}{'.trans' if trans else ''}.shared.b16"

    def manual(inputs):
        memory, rows = inputs["x"].view(np.uint16), inputs["rows"]
        y = np.zeros((count, 32, 2), np.uint16)
        for i in range(count):
            for lane in range(32):
                for half in (0, 1):
                    r, c = held(lane, half, trans)
                    y[i, lane, half] = memory[rows[8 * i + r] // 2 + c]
        return {"y": y.view(np.uint32)[..., 0]}

    store = "".join(f"st.global.b32 [%rd3+{128 * i}], %r{10 + i};" for i in range(count))
    body = f"{COPY_IN} {ROW_ADDRESS} {name} {{{registers(10, count)}}}, [%r6]; mad.wide.u32 %rd3, %t, 4, %y; {store}"
    given = {"x": generator(name).integers(0, 1 << 32, 128, np.uint64).astype(np.uint32), "rows": matrix_rows(name)}
    return Program(name, kernel(body, ["x", "rows", "y"], shared=512), given, {"y": ((count, 32), np.uint32)}, manual)


def store(count: int, trans: bool) -> Program:
    """What is not stored keeps what was there."""
    name = f"stmatrix.sync.aligned.m8n8.x{count}{'.trans' if trans else ''}.shared.b16"

    def manual(inputs):
        memory, rows = inputs["x"].copy().view(np.uint16), inputs["rows"]
        halves = inputs["z"].view(np.uint16).reshape(4, 32, 2)
        for i in range(count):
            for lane in range(32):
                for half in (0, 1):
                    r, c = held(lane, half, trans)
                    memory[rows[8 * i + r] // 2 + c] = halves[i, lane, half]
        return {"y": memory.view(np.uint32)}

    fetch = "".join(f"ld.global.b32 %r{10 + i}, [%rd3+{128 * i}];" for i in range(count))
    body = f"{COPY_IN} {ROW_ADDRESS} mad.wide.u32 %rd3, %t, 4, %z; {fetch} {name} [%r6], {{{registers(10, count)}}}; {COPY_OUT}"
    rng = generator(name)
    given = {"x": rng.integers(0, 1 << 32, 128, np.uint64).astype(np.uint32), "rows": matrix_rows(name),
             "z": rng.integers(0, 1 << 32, (4, 32), np.uint64).astype(np.uint32)}  # fmt: skip
    return Program(name, kernel(body, ["x", "rows", "z", "y"], shared=512), given, {"y": ((128,), np.uint32)}, manual)


def transpose() -> Program:
    name = "movmatrix.sync.aligned.m8n8.trans.b16"

    def manual(inputs):
        x, y = inputs["x"].view(np.uint16).reshape(32, 2), np.zeros((32, 2), np.uint16)
        for lane in range(32):
            for half in (0, 1):
                r, c = held(lane, half, True)
                y[lane, half] = x[4 * r + c // 2, c % 2]
        return {"y": y.view(np.uint32)[:, 0]}

    body = f"""mad.wide.u32 %rd1, %t, 4, %x; ld.global.b32 %r1, [%rd1]; {name} %r2, %r1;
mad.wide.u32 %rd2, %t, 4, %y; st.global.b32 [%rd2], %r2;"""
    x = generator(name).integers(0, 1 << 32, 32, np.uint64).astype(np.uint32)
    return Program(name, kernel(body, ["x", "y"]), {"x": x}, {"y": ((32,), np.uint32)}, manual)


# ---- mma.sync --------------------------------------------------------------------------------------------------------

BITS = {"bf16": 16, "f16": 16, "tf32": 32}


def a_element(lane: int, i: int, bits: int) -> tuple[int, int]:
    """(row, k) of element i of A. 16 bits: rows g, g + 8 alternate every two elements, k steps by 8 every four; tf32: rows
    alternate every element, k steps by 4 every two."""
    g, t = lane // 4, lane % 4
    return (g + 8 * (i // 2 % 2), 2 * t + i % 2 + 8 * (i // 4)) if bits == 16 else (g + 8 * (i % 2), t + 4 * (i // 2))


def b_element(lane: int, i: int, bits: int) -> tuple[int, int]:
    """(k, column) of element i of B."""
    g, t = lane // 4, lane % 4
    return (2 * t + i % 2 + 8 * (i // 2), g) if bits == 16 else (t + 4 * i, g)


def c_element(lane: int, i: int) -> tuple[int, int]:
    """(row, column) of element i of C and D."""
    return lane // 4 + 8 * (i // 2), 2 * (lane % 4) + i % 2


def raw(x: np.ndarray, kind: str) -> np.ndarray:
    """Bits of values exact in `kind`: uint16, uint32 for tf32."""
    if kind == "f16":
        return x.astype(np.float16).view(np.uint16)
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return bits if kind == "tf32" else (bits >> 16).astype(np.uint16)


def fragments(m: np.ndarray, element, count: int, bits: int) -> np.ndarray:
    """uint32 [registers, 32] holding matrix m (bits, uint16 or uint32) as `element` says."""
    out = np.empty((32, count), m.dtype)
    for lane in range(32):
        for i in range(count):
            out[lane, i] = m[element(lane, i, bits)]
    return np.ascontiguousarray(out.view(np.uint32).T)


def tensor_values(name: str, shape: tuple[int, ...], kind: str, spread: int | None) -> np.ndarray:
    """Values exact in `kind` ("f32": of full precision): integers in [-8, 8] without a spread, else random with exponents in
    [-spread, spread]."""
    rng = generator(name)
    if spread is None:
        return rng.integers(-8, 9, shape).astype(np.float32)
    x = (rng.uniform(1, 2, shape) * rng.choice([-1.0, 1.0], shape) * np.exp2(rng.integers(-spread, spread + 1, shape))).astype(
        np.float32
    )
    keep = {"bf16": 16, "f16": 13, "tf32": 13, "f32": 0}[kind]  # fp32 bits that the format lacks
    return (x.view(np.uint32) >> keep << keep).view(np.float32)


def mma(shape: str, kind: str, out: str = "f32", spread: int | None = None, full: bool = False) -> Program:
    """One mma.sync. Layout (integers): the manual decides every bit. Accumulation (spread): compared with the model.
    full: fp32 registers as tf32 operands, as Triton passes them; the low 13 bits are ignored."""
    k, bits = int(shape.split("k")[1]), BITS[kind]
    op = f"mma.sync.aligned.{shape}.row.col.{out}.{kind}.{kind}.{out}"
    name = op + (f" spread {spread}" if spread is not None else "") + (" of fp32" if full else "")
    na, nb, nc = k * bits // 64, k * bits // 128, 4 if out == "f32" else 2
    rounds = 1 if spread is None else 8  # independent products
    a, b = (
        tensor_values(f"{name} {n}", (rounds, *s), "f32" if full else kind, spread) for n, s in (("a", (16, k)), ("b", (k, 8)))
    )
    c = tensor_values(f"{name} c", (rounds, 16, 8), "f32" if out == "f32" else "f16", spread)
    held = "tf32" if out == "f32" else "f16"  # 32 or 16 bits an element of C and D

    def accumulators(x):
        return fragments(raw(x, held), lambda lane, i, _: c_element(lane, i), 4, 0)

    given = {"a": np.stack([fragments(raw(x, kind), a_element, k // 2, bits) for x in a]),
             "b": np.stack([fragments(raw(x, kind), b_element, k // 4, bits) for x in b]),
             "c": np.stack([accumulators(x) for x in c])}  # fmt: skip

    def manual(inputs):
        d = a.astype(np.float64) @ b.astype(np.float64) + c
        y = np.stack([accumulators(x.astype(np.float32)) for x in d])
        return {"y": y.view(np.float32) if out == "f32" else y}

    def fetch(array, n, first):
        at = f"mad.wide.u32 %rd1, %r0, {128 * n}, %{array}; mad.wide.u32 %rd1, %t, 4, %rd1;"
        return at + "".join(f"ld.global.b32 %r{first + i}, [%rd1+{128 * i}];" for i in range(n))

    body = f"""mov.b32 %r0, %ctaid.x; {fetch("a", na, 1)} {fetch("b", nb, 9)} {fetch("c", nc, 13)}
{op} {{{registers(17, nc)}}}, {{{registers(1, na)}}}, {{{registers(9, nb)}}}, {{{registers(13, nc)}}};
mad.wide.u32 %rd1, %r0, {128 * nc}, %y; mad.wide.u32 %rd1, %t, 4, %rd1;""" + "".join(
        f"st.global.b32 [%rd1+{128 * i}], %r{17 + i};" for i in range(nc)
    )
    dtype = np.float32 if out == "f32" else np.uint32
    if out == "f32":
        body = body.replace("%r13", "%f0").replace("%r14", "%f1").replace("%r15", "%f2").replace("%r16", "%f3")
        body = body.replace("%r17", "%f4").replace("%r18", "%f5").replace("%r19", "%f6").replace("%r20", "%f7")
    return Program(name, kernel(body, ["a", "b", "c", "y"]), given, {"y": ((rounds, nc, 32), dtype)},
                   manual if spread is None else None, grid=rounds, compare=Bitwise(nan=out == "f32"))  # fmt: skip


TYPES = (
    ("m16n8k16", "bf16"),
    ("m16n8k8", "bf16"),
    ("m16n8k16", "f16"),
    ("m16n8k8", "f16"),
    ("m16n8k8", "tf32"),
    ("m16n8k4", "tf32"),
)

PROGRAMS = [
    *(make(count, trans) for make in (load, store) for count in (1, 2, 4) for trans in (False, True)), transpose(),
    *(mma(*t) for t in TYPES), mma("m16n8k16", "f16", "f16"),
    *(mma(*t, spread=spread) for t in TYPES for spread in (0, 6)), mma("m16n8k16", "bf16", spread=40),
    mma("m16n8k8", "tf32", spread=40),
    mma("m16n8k16", "f16", "f16", spread=2), mma("m16n8k8", "tf32", spread=3, full=True),
]  # fmt: skip
