"""wgmma: fragments of A and D, descriptors, swizzles, transposes and sums (PTX ISA, "Asynchronous Warpgroup Level Matrix
Multiply-Accumulate Instructions").

A shared-memory image is written by ordinary stores in a canonical layout of the manual (loops over elements below), one wgmma
reads it, and every accumulator register goes out. Layout programs use small integers, which any sum gets right; the others
are held to the emulator's model of the tensor core. One program does what the rungs do: several steps of K in one group.
"""

from __future__ import annotations

import numpy as np

from .matrices import raw, tensor_values
from .program import Bitwise, Program, kernel
from .tensor_copies import swizzled

K = {"bf16": 16, "f16": 16, "tf32": 8}
CODE = {"none": 0, "128B": 1, "64B": 2, "32B": 3}
SPAN = {"none": 16, "32B": 32, "64B": 64, "128B": 128}


def place(m: np.ndarray, image: np.ndarray, base: int, swizzle: str, k_major: bool) -> tuple[int, int]:
    """Write operand m [rows of M or N, K] (bits) into the bytes of `image` at `base`; returns (leading, stride) byte offsets.

    K-major: core matrices of 8 rows by one swizzle span (16 bytes without swizzle) along K; along M or N one after the other
    (stride), along K, without swizzle, side by side (leading). MN-major: the span runs along M or N, 8 rows of K deep; the next
    span along M or N is `leading` further with a swizzle, and `stride` without; the next 8 of K the other one.
    """
    rows, k = m.shape
    size, span = m.itemsize, SPAN[swizzle]
    run = span // size  # elements of a span
    if k_major:
        stride = 8 * span * (max(k // run, 1) if swizzle == "none" else 1)
        leading = 8 * span
    elif swizzle == "none":
        leading, stride = 128 * (rows // run), 128  # next 8 of K; next 8 of M or N
    else:
        leading, stride = 8 * span * (k // 8), 8 * span  # next span of M or N; next 8 of K
    for i in range(rows):
        for j in range(k):
            if k_major:
                at = i % 8 * span + i // 8 * stride + j // run * leading + j % run * size
            elif swizzle == "none":
                at = j % 8 * 16 + j // 8 * leading + i // run * stride + i % run * size
            else:
                at = j % 8 * span + j // 8 * stride + i // run * leading + i % run * size
            to = swizzled(base + at, swizzle)
            image[to : to + size] = np.frombuffer(m[i, j].tobytes(), np.uint8)
    return leading, stride


def descriptor(base: int, leading: int, stride: int, swizzle: str) -> int:
    """Matrix descriptor without the shared array's own address: start, leading and stride offsets in units of 16 bytes."""
    return base >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | CODE[swizzle] << 62


def room(rows: int, row: int, swizzle: str, mn_major: bool, bits: int) -> int:
    """Bytes of an operand of `rows` rows of `row` bytes along K, in whole kilobytes, where every swizzle pattern starts anew."""
    used = max(rows, SPAN[swizzle] * 8 // bits) * row if mn_major else rows * max(SPAN[swizzle], row)
    return -(-used // 1024) * 1024


def d_element(thread: int, i: int) -> tuple[int, int]:
    """(row, column) of accumulator i: a warp has 16 rows; two columns, then eight rows further down, then eight columns on."""
    warp, lane = thread // 32, thread % 32
    return 16 * warp + lane // 4 + 8 * (i // 2 % 2), 2 * (lane % 4) + i % 2 + 8 * (i // 4)


def a_element(thread: int, i: int, bits: int) -> tuple[int, int]:
    warp, lane = thread // 32, thread % 32
    if bits == 32:
        return 16 * warp + lane // 4 + 8 * (i % 2), lane % 4 + 4 * (i // 2)
    return 16 * warp + lane // 4 + 8 * (i // 2 % 2), 2 * (lane % 4) + i % 2 + 8 * (i // 4)


def gathered(m: np.ndarray, element, count: int) -> np.ndarray:
    return np.stack([np.array([m[element(t, i)] for i in range(count)], m.dtype) for t in range(128)])


def wgmma(n: int, kind: str = "bf16", a_from: str = "shared", swizzle: str = "128B", a_swizzle: str | None = None,
          trans_a: bool = False, trans_b: bool = False, scale: tuple[int, int, int] = (1, 1, 1), spread: int | None = None,
          steps: int = 1, full: bool = False) -> Program:  # fmt: skip
    """scale: (scale-d, imm-scale-a, imm-scale-b). steps: instructions of one group, each over its own K of the operands."""
    k, bits, a_swizzle = K[kind], 32 if kind == "tf32" else 16, a_swizzle or swizzle
    op = f"wgmma.mma_async.sync.aligned.m64n{n}k{k}.f32.{kind}.{kind}"
    name = f"{op} A {a_from}" + (f" {a_swizzle}" if a_from == "shared" else "") + (" MN-major" if trans_a else "")
    name += f", B {swizzle}" + (" MN-major" if trans_b else "") + f" scale {scale} steps {steps}"
    name += ("" if spread is None else f" spread {spread}") + (" of fp32" if full else "")
    drawn = "f32" if full else kind
    a, b = tensor_values(name + " a", (steps, 64, k), drawn, spread), tensor_values(name + " b", (steps, n, k), drawn, spread)
    c = tensor_values(name + " c", (64, n), "f32", spread)
    each = {"a": room(64, k * bits // 8, a_swizzle, trans_a, bits), "b": room(n, k * bits // 8, swizzle, trans_b, bits)}
    image = np.zeros(steps * (each["b"] + (each["a"] if a_from == "shared" else 0)), np.uint8)
    words, at = {"a": [], "b": []}, 0
    for s in range(steps):
        for which, m, mode, trans in (("b", b, swizzle, trans_b), ("a", a, a_swizzle, trans_a)):
            if which == "b" or a_from == "shared":
                words[which].append(descriptor(at, *place(raw(m[s], kind), image, at, mode, not trans), mode))
                at += each[which]
    given = {"image": image, "c": gathered(c, d_element, n // 2)}
    if a_from == "registers":
        parts = [gathered(raw(x, kind), lambda t, i: a_element(t, i, bits), 64 * k // 128) for x in a]
        given["a"] = np.stack([p.view(np.uint32) for p in parts])  # [steps, 128, 4]

    def manual(_):
        d = (
            sum(x.astype(np.float64) @ y.astype(np.float64).T for x, y in zip(a, b, strict=True)) * scale[1] * scale[2]
            + scale[0] * c
        )
        return {"y": gathered(d.astype(np.float32), d_element, n // 2)}

    acc = ", ".join(f"%d{i}" for i in range(n // 2))
    body = [f"""
mov.b32 %r1, %t;
COPY: setp.ge.u32 %p1, %r1, {len(image) // 16}; @%p1 bra COPIED; mad.wide.u32 %rd1, %r1, 16, %image;
mad.lo.u32 %r2, %r1, 16, %smem;
ld.global.v4.b32 {{%r3, %r4, %r5, %r6}}, [%rd1]; st.shared.v4.b32 [%r2], {{%r3, %r4, %r5, %r6}}; add.u32 %r1, %r1, 128; bra COPY;
COPIED: fence.proxy.async.shared::cta; bar.sync 0;
shr.u32 %r1, %smem, 4; and.b32 %r1, %r1, 0x3fff; cvt.u64.u32 %rd9, %r1; mad.wide.u32 %rd2, %t, {2 * n}, %c;
mad.wide.u32 %rd4, %t, 16, {"%a" if a_from == "registers" else "%c"};
setp.ne.b32 %p2, {scale[0]}, 0;""", *(f"ld.global.b32 %d{i}, [%rd2+{4 * i}];" for i in range(n // 2))]  # fmt: skip
    for s in range(steps):
        if a_from == "registers":
            body.append(f"ld.global.v4.b32 {{{', '.join(f'%r{20 + 4 * s + i}' for i in range(4))}}}, [%rd4+{2048 * s}];")
    body.append("wgmma.fence.sync.aligned;")
    for s in range(steps):
        body.append(f"add.u64 %rd5, %rd9, {words['b'][s]};")
        if a_from == "shared":
            body.append(f"add.u64 %rd6, %rd9, {words['a'][s]};")
        source = "%rd6" if a_from == "shared" else "{" + ", ".join(f"%r{20 + 4 * s + i}" for i in range(4)) + "}"
        flags = [] if kind == "tf32" else [int(trans_b)] if a_from == "registers" else [int(trans_a), int(trans_b)]
        body.append(f"{op} {{{acc}}}, {source}, %rd5, {'%p2' if s == 0 else '1'}, {', '.join(map(str, [*scale[1:], *flags]))};")
    body += ["wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;", f"mad.wide.u32 %rd7, %t, {2 * n}, %y;"]
    body += [f"st.global.b32 [%rd7+{4 * i}], %d{i};" for i in range(n // 2)]
    text = kernel("\n".join(body), [*given, "y"], shared=len(image), registers=f".reg .f32 %d<{n // 2}>;")
    return Program(
        name,
        text,
        given,
        {"y": ((128, n // 2), np.float32)},
        manual if spread is None else None,
        block=128,
        compare=Bitwise(nan=True),
    )


SWIZZLES = ("none", "32B", "64B", "128B")

PROGRAMS = [
    *(wgmma(n, a_from=a) for n in (8, 32, 64, 128, 256) for a in ("registers", "shared")),
    *(wgmma(64, swizzle=s, trans_b=t) for s in SWIZZLES[:3] for t in (False, True)), wgmma(64, trans_b=True),
    wgmma(128, trans_b=True, a_from="registers"),
    *(wgmma(64, a_swizzle=s, trans_a=True) for s in SWIZZLES), wgmma(32, trans_b=True, swizzle="64B", a_from="registers"),
    wgmma(64, trans_a=True, trans_b=True), wgmma(64, kind="f16", a_from="registers"), wgmma(128, kind="f16", trans_b=True),
    *(wgmma(64, kind="tf32", a_from=a, swizzle=s) for a in ("registers", "shared") for s in ("32B", "128B")),
    wgmma(64, scale=(0, 1, 1)), wgmma(64, scale=(1, -1, 1)), wgmma(64, scale=(1, 1, -1)), wgmma(64, scale=(1, -1, -1)),
    wgmma(64, steps=4, swizzle="32B"),
    *(wgmma(64, kind=kind, spread=spread) for kind in ("bf16", "f16", "tf32") for spread in (0, 6)), wgmma(64, spread=40),
    wgmma(64, a_from="registers", spread=3, steps=4, swizzle="32B"),
    wgmma(64, kind="tf32", a_from="registers", spread=3, full=True),
]  # fmt: skip
