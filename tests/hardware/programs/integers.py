"""Integer, logic, shift and selection instructions (PTX ISA, "Integer Arithmetic Instructions", "Logic and Shift Instructions",
"Data Movement and Conversion Instructions: prmt"). The expected values are Python integers, one element at a time.
"""

from __future__ import annotations

import numpy as np

from .program import generator, lanes

MASK = 0xFFFFFFFF
EDGES = (0, 1, 2, 0x7FFFFFFF, 0x80000000, 0x80000001, 0xFFFFFFFF, 0xFFFFFFFE, 31, 32, 33, 63, 64, 0xFF, 0x100, 0xAAAAAAAA)


def signed(x: int, bits: int = 32) -> int:
    return (x & (1 << bits) - 1) - (1 << bits if x >> bits - 1 & 1 else 0)


def words(name: str, n: int = 512, small: bool = False, bits: int = 32) -> np.ndarray:
    """Random words of every length, edge values first; small: below 80, as shift counts and field lengths."""
    rng = generator(name)
    x = rng.integers(0, (1 << bits) - 1, n, np.uint64, endpoint=True)
    x >>= rng.integers(0, bits, n).astype(np.uint64)
    edges = [e | e << 32 if bits == 64 else e for e in EDGES]
    x[: 4 * len(EDGES)] = rng.permutation(np.array(edges * 4, np.uint64))
    if small:
        x = np.where(np.arange(n) % 8 > 0, x % 80, x)
    return x.astype(f"u{bits // 8}")


def program(name: str, arity: int, fn, body: str | None = None, dtype=np.uint32, small: str = "", bits: str = ""):
    """fn(*ints) -> int, unsigned in and (cut to the width of dtype) out; small names the operands that are counts, bits gives the
    operands' widths where they are not 32, as in "a64 b32"."""
    width = {n: 32 for n in "abc"[:arity]} | {w[0]: int(w[1:]) for w in bits.split()}

    def manual(inputs):
        rows = zip(*(inputs[n].tolist() for n in "abc"[:arity]), strict=True)
        return {"y": np.array([fn(*row) % (1 << 8 * np.dtype(dtype).itemsize) for row in rows], dtype)}

    given = {n: words(f"{name} {n}", small=n in small, bits=width[n]) for n in "abc"[:arity]}
    return lanes(name, body or f"{name} y, {', '.join('abc'[:arity])};", given, {"y": dtype}, manual)


def permute(selector: int, bytes_: list[int]) -> int:
    out = 0
    for i in range(4):
        nibble = selector >> 4 * i & 15
        byte = bytes_[nibble & 7]
        out |= (0xFF * (byte >> 7) if nibble & 8 else byte) << 8 * i
    return out


def prmt(a: int, b: int, c: int) -> int:
    """Default mode: nibble i of c picks one of eight bytes for byte i; its top bit replicates that byte's sign."""
    return permute(c, [(b << 32 | a) >> 8 * i & 0xFF for i in range(8)])


def lop3(table: int):
    def fn(a, b, c):
        return sum((table >> ((a >> i & 1) * 4 + (b >> i & 1) * 2 + (c >> i & 1)) & 1) << i for i in range(32))

    return program(f"lop3.b32 0x{table:02x}", 3, fn, f"lop3.b32 y, a, b, c, {table};")


def field_extract(sign: bool, bits: int = 32):
    """bfe: len bits from pos, both taken modulo 256 (not so with 64 bits, as measured, whatever the manual says); past the top
    come zeros, or the sign at min(pos + len - 1, 31)."""

    def fn(a, b, c):
        pos, length = (b, c) if bits == 64 else (b & 0xFF, c & 0xFF)
        top = a >> min(pos + length - 1, bits - 1) & 1 if sign and length else 0
        return sum((a >> pos + i & 1 if i < length and pos + i < bits else top) << i for i in range(bits))

    name, dtype = f"bfe.{'s' if sign else 'u'}{bits}", np.uint64 if bits == 64 else np.uint32
    return program(name, 3, fn, dtype=dtype, small="bc", bits=f"a{bits}")


def field_insert(a, b, c, d):
    pos, length = c & 0xFF, d & 0xFF
    for i in range(length):
        if pos + i < 32:
            b = b & ~(1 << pos + i) | (a >> i & 1) << pos + i
    return b


def bfi():
    given = {n: words(f"bfi {n}", small=n in "cd") for n in "abcd"}

    def manual(inputs):
        return {
            "y": np.array([field_insert(*row) for row in zip(*(x.tolist() for x in inputs.values()), strict=True)], np.uint32)
        }

    return lanes("bfi.b32", "bfi.b32 y, a, b, c, d;", given, {"y": np.uint32}, manual)


def funnel(left: bool, wrap: bool):
    """[b, a] as 64 bits, shifted by c modulo 32 (wrap) or at most 32 (clamp): the upper half, or of a right shift the lower."""

    def fn(a, b, c):
        n, x = (c & 31 if wrap else min(c, 32)), b << 32 | a
        return (x << n >> 32 if left else x >> n) & MASK

    return program(f"shf.{'l' if left else 'r'}.{'wrap' if wrap else 'clamp'}.b32", 3, fn, small="c")


def divided(a, b):
    """Towards zero; the remainder has the sign of a."""
    q = abs(signed(a)) // abs(signed(b))
    return q if (signed(a) < 0) == (signed(b) < 0) else -q


def dividing(name: str, fn):
    """Division by zero is left out: the manual does not say what it gives."""
    p = program(name, 2, fn)
    p.inputs["b"][p.inputs["b"] == 0] = 7
    return p


PROGRAMS = [
    program("prmt.b32", 3, prmt), *map(lop3, (0xE8, 0x96, 0xC0, 0x3C, 0x01, 0xB8)), field_extract(False), field_extract(True),
    field_extract(False, 64), bfi(),
    *(funnel(left, wrap) for left in (False, True) for wrap in (False, True)),
    program("shl.b32", 2, lambda a, b: a << min(b, 32), small="b"),
    program("shr.u32", 2, lambda a, b: a >> min(b, 32), small="b"),
    program("shr.s32", 2, lambda a, b: signed(a) >> min(b, 31), small="b"),
    program("mul.hi.u32", 2, lambda a, b: a * b >> 32), program("mul.hi.s32", 2, lambda a, b: signed(a) * signed(b) >> 32),
    program("mul.wide.u32", 2, lambda a, b: a * b, dtype=np.uint64),
    program("mul.wide.s32", 2, lambda a, b: signed(a) * signed(b), dtype=np.uint64),
    program("mad.lo.s32", 3, lambda a, b, c: a * b + c),
    program("mul.wide.s16", 2, lambda a, b: signed(a, 16) * signed(b, 16), bits="a16 b16"),
    program("mad.wide.s32", 3, lambda a, b, c: signed(a) * signed(b) + c, dtype=np.uint64, bits="c64"),
    program("mad.lo.s64", 3, lambda a, b, c: a * b + c, dtype=np.uint64, bits="a64 b64 c64"),
    program("shl.b64", 2, lambda a, b: a << min(b, 64), dtype=np.uint64, small="b", bits="a64"),
    program("shr.u64", 2, lambda a, b: a >> min(b, 64), dtype=np.uint64, small="b", bits="a64"),
    program("shr.s16", 2, lambda a, b: signed(a, 16) >> min(b, 15), dtype=np.uint16, small="b", bits="a16"),
    dividing("div.s32", divided), dividing("rem.s32", lambda a, b: signed(a) - signed(b) * divided(a, b)),
    dividing("div.u32", lambda a, b: a // b),
    program("popc.b32", 1, lambda a: a.bit_count()), program("clz.b32", 1, lambda a: 32 - a.bit_length()),
    program("brev.b32", 1, lambda a: int(f"{a:032b}"[::-1], 2)),
    program("min.s32", 2, lambda a, b: min(signed(a), signed(b))), program("max.u32", 2, max),
    program("setp.lt.s32", 2, lambda a, b: signed(a) < signed(b), "setp.lt.s32 %p1, a, b; selp.b32 y, 1, 0, %p1;"),
    program("setp.lt.u32", 2, lambda a, b: a < b, "setp.lt.u32 %p1, a, b; selp.b32 y, 1, 0, %p1;"),
]  # fmt: skip
