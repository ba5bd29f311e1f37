"""One instruction at a time against independent numpy or torch arithmetic."""

import decimal
import math
from fractions import Fraction

import numpy as np
import pytest
import torch

import emulator
from ptx_programs import bits, lanes

RNG = np.random.default_rng(7)
EDGE = np.array([0, 1, 2, 31, 32, 33, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0xDEADBEEF], np.uint32)


@pytest.fixture(autouse=True)
def same_draws():
    """For each test, whichever ran before it in this process."""
    RNG.bit_generator.state = np.random.default_rng(7).bit_generator.state
    torch.manual_seed(7)


def words(n=64, dtype=np.uint32):
    x = RNG.integers(0, 1 << 8 * np.dtype(dtype).itemsize, n, dtype=f"u{np.dtype(dtype).itemsize}")
    x[: len(EDGE)] = EDGE[:n].astype(x.dtype)
    return x.view(dtype)


def singles(n=64):
    x = bits(RNG.standard_normal(n).astype(np.float32) * np.exp2(RNG.integers(-20, 20, n)).astype(np.float32))
    x[:12] = bits(
        np.array([0, -0.0, 1, -1, np.inf, -np.inf, np.nan, 1e-40, -1e-42, 3.4e38, 1 + 2**-8, 1 + 2**-11], np.float32)
    )
    return x.view(np.float32)


def signed(v, width):
    return v - (1 << width) if v >> (width - 1) else v


INTEGER = {
    "add.s32 y0, x0, x1;": lambda a, b: a + b,
    "sub.u32 y0, x0, x1;": lambda a, b: a - b,
    "mul.lo.s32 y0, x0, x1;": lambda a, b: a * b,
    "mul.hi.u32 y0, x0, x1;": lambda a, b: a * b >> 32,
    "mul.hi.s32 y0, x0, x1;": lambda a, b: signed(a, 32) * signed(b, 32) >> 32,
    "and.b32 y0, x0, x1;": lambda a, b: a & b,
    "xor.b32 y0, x0, x1;": lambda a, b: a ^ b,
    "not.b32 y0, x0;": lambda a, b: ~a,
    "shl.b32 y0, x0, x1;": lambda a, b: a << b if b < 32 else 0,
    "shr.u32 y0, x0, x1;": lambda a, b: a >> b if b < 32 else 0,
    "shr.s32 y0, x0, x1;": lambda a, b: signed(a, 32) >> min(b, 31),
    "min.s32 y0, x0, x1;": lambda a, b: min(signed(a, 32), signed(b, 32)),
    "max.u32 y0, x0, x1;": lambda a, b: max(a, b),
    "abs.s32 y0, x0;": lambda a, b: abs(signed(a, 32)),
    "popc.b32 y0, x0;": lambda a, b: bin(a).count("1"),
    "clz.b32 y0, x0;": lambda a, b: 32 - a.bit_length(),
    "brev.b32 y0, x0;": lambda a, b: int(f"{a:032b}"[::-1], 2),
    "bfind.u32 y0, x0;": lambda a, b: a.bit_length() - 1,
    "shf.l.wrap.b32 y0, x0, x1, 7;": lambda a, b: (b << 32 | a) >> 25,
    "shf.r.clamp.b32 y0, x0, x1, 40;": lambda a, b: b,
    "bfe.u32 y0, x0, 5, 9;": lambda a, b: a >> 5 & 511,
    "bfe.s32 y0, x0, 5, 9;": lambda a, b: signed(a >> 5 & 511, 9),
    "bfi.b32 y0, x0, x1, 4, 8;": lambda a, b: b & ~0xFF0 | (a & 0xFF) << 4,
    "lop3.b32 y0, x0, x1, 0x0F0F0F0F, 0xEA;": lambda a, b: a & b | 0x0F0F0F0F,
    "prmt.b32 y0, x0, x1, 0x5410;": lambda a, b: b << 16 | a & 0xFFFF,
    "rem.s32 y0, x0, 7;": lambda a, b: int(math.fmod(signed(a, 32), 7)),
    "div.s32 y0, x0, -7;": lambda a, b: int(Fraction(signed(a, 32), -7)),
    "div.u32 y0, x0, 10;": lambda a, b: a // 10,
}


@pytest.mark.parametrize("body", INTEGER)
def test_integer(body):
    a, b = words(), words()[::-1].copy()
    b[:20] %= 40
    got = lanes(body, [a, b], [np.uint32])
    assert got.tolist() == [INTEGER[body](int(x), int(y)) % (1 << 32) for x, y in zip(a, b)]


WIDE = {
    "mul.wide.u32 y0, x0, x1;": lambda a, b: a * b,
    "mul.wide.s32 y0, x0, x1;": lambda a, b: signed(a, 32) * signed(b, 32),
    "mad.wide.u32 y0, x0, x1, 99;": lambda a, b: a * b + 99,
    "cvt.u64.u32 y0, x0;": lambda a, b: a,
    "cvt.s64.s32 y0, x0;": lambda a, b: signed(a, 32),
    "cvt.s64.s8 y0, x0;": lambda a, b: signed(a & 255, 8),
    "mov.b64 y0, {x0, x1};": lambda a, b: b << 32 | a,
}


@pytest.mark.parametrize("body", WIDE)
def test_wide(body):
    a, b = words(), words()[::-1].copy()
    assert lanes(body, [a, b], [np.uint64]).tolist() == [WIDE[body](int(x), int(y)) % (1 << 64) for x, y in zip(a, b)]


def test_mul_hi_64():
    a, b = words(64, np.uint64), words(64, np.uint64)[::-1].copy()
    assert lanes("mul.hi.u64 y0, x0, x1;", [a, b], [np.uint64]).tolist() == [
        int(x) * int(y) >> 64 for x, y in zip(a, b)
    ]
    assert lanes("mul.hi.s64 y0, x0, x1;", [a, b], [np.int64]).tolist() == [
        signed(int(x), 64) * signed(int(y), 64) >> 64 for x, y in zip(a, b)
    ]


@pytest.mark.parametrize(
    "op, fn",
    [
        ("lt.s32", lambda a, b: signed(a, 32) < signed(b, 32)),
        ("lo.u32", lambda a, b: a < b),
        ("ge.u32", lambda a, b: a >= b),
        ("ne.b32", lambda a, b: a != b),
    ],
)
def test_setp_selp(op, fn):
    a, b = words(), RNG.permutation(words())
    got = lanes(f"setp.{op} %p1, x0, x1; selp.b32 y0, 1, 0, %p1;", [a, b], [np.uint32])
    assert got.tolist() == [int(fn(int(x), int(y))) for x, y in zip(a, b)]


def test_setp_float_and_combination():
    a, b = singles(), RNG.permutation(singles())
    for op, fn in {
        "lt": lambda x, y: x < y,
        "ne": lambda x, y: x != y and not (math.isnan(x) or math.isnan(y)),
        "neu": lambda x, y: x != y or math.isnan(x) or math.isnan(y),
        "gtu": lambda x, y: not x <= y,
        "nan": lambda x, y: math.isnan(x) or math.isnan(y),
    }.items():
        got = lanes(f"setp.{op}.f32 %p1, x0, x1; selp.b32 y0, 1, 0, %p1;", [a, b], [np.uint32])
        assert got.tolist() == [int(fn(float(x), float(y))) for x, y in zip(a, b)], op
    got = lanes(
        "setp.eq.u32 %p2, %t, 3; setp.lt.and.f32 %p1|%p3, x0, x1, !%p2;selp.b32 y0, 1, 0, %p1; selp.b32 y1, 1, 0, %p3;",
        [a, b],
        [np.uint32, np.uint32],
    )
    less, other = a < b, np.arange(64) != 3
    assert (got[0] == (less & other)).all() and (got[1] == (~less & other)).all()


def exact(x):
    return Fraction(float(x))


def nearest32(q):
    """Fraction to float32, to nearest even, by integer arithmetic."""
    if q == 0:
        return np.float32(0)
    sign, q = (-1, -q) if q < 0 else (1, q)
    e = q.numerator.bit_length() - q.denominator.bit_length()
    e -= q < Fraction(2) ** e
    ulp = Fraction(2) ** max(e - 23, -149)
    n, rest = divmod(q, ulp)
    n += rest > ulp / 2 or (rest == ulp / 2 and n % 2)
    v = n * ulp
    return np.float32(sign * math.inf) if v >= Fraction(2) ** 128 else np.float32(sign * float(v))


def test_fma_is_rounded_once():
    x = np.array(
        [
            [1 + 2**-12, 1 + 2**-12, -1],
            [1 + 2**-23, 1 - 2**-23, -1],
            [1.5, 2**-24, 1],
            [3, 2**-26, 1 + 2**-23],
            [1e-30, 1e-12, 1e-40],
        ],
        np.float32,
    )
    x = np.concatenate([x, (RNG.standard_normal((59, 3)) * np.exp2(RNG.integers(-14, 14, (59, 3)))).astype(np.float32)])
    got = lanes("fma.rn.f32 y0, x0, x1, x2;", [x[:, 0], x[:, 1], x[:, 2]], [np.float32])
    want = [nearest32(exact(a) * exact(b) + exact(c)) for a, b, c in x]
    assert bits(got).tolist() == bits(np.array(want)).tolist()


def test_a_double_fma_is_rounded_once():
    special = [
        [1 + 2.0**-52, 1 - 2.0**-52, -1], [2.0**600, 2.0**600, -math.inf], [2.0**1000, 2.0**24, -(2.0**1023)], [2.0**1000, 2.0**100, 1],
        [2.0**-600, 2.0**-600, 2.0**-1074], [-(2.0**-540), 2.0**-540, 0], [math.inf, 0, 1], [math.nan, 1, 1], [1, math.inf, -math.inf],
        [3, 5, -15], [-3, 0.0, 0.0], [-3, 0.0, -0.0], [1.5, 2.0**-53, 1], [2.0**1000, 2.0**30, math.nan],
    ]  # fmt: skip
    drawn = RNG.standard_normal((50, 3)) * np.exp2(RNG.integers(-60, 60, (50, 3)).astype(float))
    x = np.concatenate([np.array(special), drawn])
    got = lanes("fma.rn.f64 y0, x0, x1, x2;", [x[:, 0], x[:, 1], x[:, 2]], [np.float64])
    with decimal.localcontext(decimal.Context(prec=4000, Emax=10**6, Emin=-(10**6))):
        want = [float(decimal.Decimal(a) * decimal.Decimal(b) + decimal.Decimal(c)) for a, b, c in drawn.tolist()]
    rest = [-(2.0**-104), -math.inf, 2.0**1023, math.inf, 2.0**-1074, -0.0, math.nan, math.nan, math.nan, 0.0, 0.0, -0.0, 1 + 2.0**-52, math.nan]
    assert all(a == b and math.copysign(1, a) == math.copysign(1, b) or math.isnan(a) and math.isnan(b) for a, b in zip(got, rest + want))


@pytest.mark.parametrize(
    "mode, ok", [("rz", lambda r, q: abs(r) <= abs(q)), ("rm", lambda r, q: r <= q), ("rp", lambda r, q: r >= q)]
)
def test_directed_rounding(mode, ok):
    a, b = (RNG.standard_normal(64).astype(np.float32) for _ in range(2))
    for op, fn in (("add", lambda x, y: x + y), ("mul", lambda x, y: x * y)):
        got = lanes(f"{op}.{mode}.f32 y0, x0, x1;", [a, b], [np.float32])
        for r, x, y in zip(got, a, b):
            q = fn(exact(x), exact(y))
            gap = exact(np.nextafter(r, np.float32(np.inf))) - exact(r)
            assert ok(exact(r), q) and abs(exact(r) - q) < gap


@pytest.mark.parametrize("op", ["add", "sub", "mul", "fma.rn"])
def test_packed_f32x2(op):
    x = RNG.standard_normal((3, 64, 2)).astype(np.float32)
    n = 3 if op.startswith("fma") else 2
    args = ", ".join(f"x{i}" for i in range(n))
    got = lanes(f"{op}.f32x2 y0, {args};", [x[i].view(np.uint64).ravel() for i in range(n)], [np.uint64]).view(
        np.float32
    )
    a, b, c = (torch.from_numpy(v.reshape(-1).copy()) for v in x)
    want = {"add": a + b, "sub": a - b, "mul": a * b, "fma.rn": (a.double() * b.double() + c.double()).float()}[op]
    assert (torch.from_numpy(got) == want).all()


@pytest.mark.parametrize("kind, tt", [("bf16", torch.bfloat16), ("f16", torch.float16)])
def test_halves(kind, tt):
    x = singles()
    t = torch.from_numpy(x)
    got = lanes(f"cvt.rn.{kind}.f32 y0, x0;", [x], [np.uint16])
    want = t.to(tt).view(torch.int16).numpy().view(np.uint16)
    nan = np.isnan(x)
    assert (got[~nan] == want[~nan]).all() and (got[nan] == 0x7FFF).all()
    back = lanes(f"cvt.f32.{kind} y0, x0;", [got], [np.float32])
    assert (back[~nan] == t.to(tt).float().numpy()[~nan]).all() and np.isnan(back[nan]).all()
    a, b = (torch.from_numpy(RNG.standard_normal(64).astype(np.float32)).to(tt) for _ in range(2))
    raw = [v.view(torch.int16).numpy().view(np.uint16) for v in (a, b)]
    for op, fn in (("add", torch.add), ("sub", torch.sub), ("mul", torch.mul), ("max", torch.maximum)):
        got = lanes(f"{op}.{kind} y0, x0, x1;", raw, [np.uint16])
        assert (got == fn(a, b).view(torch.int16).numpy().view(np.uint16)).all(), op
    pair = lanes(f"cvt.rn.{kind}x2.f32 y0, x0, x1;", [x, x[::-1].copy()], [np.uint32])
    ok = ~nan & ~nan[::-1]
    assert (pair[ok] == (want.astype(np.uint32) << 16 | want[::-1])[ok]).all()  # first source in the upper half


def test_mixed_precision_add():
    a = torch.randn(64).bfloat16()
    c = torch.randn(64)
    got = lanes("add.rn.f32.bf16 y0, x0, x1;", [a.view(torch.int16).numpy().view(np.uint16), c.numpy()], [np.float32])
    assert (torch.from_numpy(got) == a.float() + c).all()


def test_float_to_int_and_back():
    x = singles()
    got = lanes("cvt.rzi.s32.f32 y0, x0;", [x], [np.int32])
    want = [
        0
        if math.isnan(v)
        else max(-(2**31), min(2**31 - 1, int(v)))
        if math.isfinite(v)
        else (2**31 - 1 if v > 0 else -(2**31))
        for v in x.astype(float)
    ]
    assert got.tolist() == want
    got = lanes("cvt.rni.u32.f32 y0, x0;", [np.array([0.5, 1.5, 2.5, -3, 4e9, 5e9], np.float32)], [np.uint32])
    assert got.tolist() == [0, 2, 2, 0, 4000000000, 2**32 - 1]
    w = words()
    assert (lanes("cvt.rn.f32.u32 y0, x0;", [w], [np.float32]) == w.astype(np.float32)).all()


def test_tf32():
    x = np.abs(singles()[7:])
    got = lanes("cvt.rna.tf32.f32 y0, x0;", [x], [np.uint32])
    assert (got & 0x1FFF == 0).all()
    f = got.view(np.float32).astype(float)
    for r, v in zip(f, x.astype(float)):
        if math.isfinite(v) and v > 1e-30:
            assert abs(r - v) <= 2.0 ** (math.floor(math.log2(v)) - 11)


@pytest.mark.parametrize(
    "op, fn, tolerance",
    [
        ("ex2.approx.ftz.f32", np.exp2, 2**-22),
        ("lg2.approx.f32", np.log2, 2**-22),
        ("rcp.approx.ftz.f32", lambda x: 1 / x, 2**-23),
        ("sqrt.approx.f32", np.sqrt, 2**-22),
        ("rsqrt.approx.f32", lambda x: x**-0.5, 2**-22),
        ("tanh.approx.f32", np.tanh, 2**-10),
    ],
)
def test_functions(op, fn, tolerance):
    x = np.exp(RNG.uniform(-3, 3, 64)).astype(np.float32)
    got, want = lanes(f"{op} y0, x0;", [x], [np.float32]).astype(float), fn(x.astype(float))
    assert (np.abs(got - want) <= tolerance * np.maximum(np.abs(want), 1 if "lg2" in op else 0)).all()


def test_ftz_and_sign_operations():
    tiny = np.array([1e-40, -1e-40, 2.0, -0.0], np.float32)
    assert bits(lanes("add.ftz.f32 y0, x0, 0f00000000;", [tiny[:1]], [np.float32]))[0] == 0
    assert bits(lanes("mul.f32 y0, x0, 0f3F800000;", [tiny[:1]], [np.float32]))[0] == bits(tiny)[0]
    assert bits(lanes("neg.f32 y0, x0;", [tiny], [np.float32])).tolist() == (bits(tiny) ^ 0x80000000).tolist()
    assert bits(lanes("abs.f32 y0, x0;", [tiny], [np.float32])).tolist() == (bits(tiny) & 0x7FFFFFFF).tolist()
    assert lanes("neg.bf16x2 y0, x0;", [np.array([0x3F80BF80], np.uint32)], [np.uint32])[0] == 0xBF803F80
    got = lanes(
        "max.f32 y0, x0, x1; max.NaN.f32 y1, x0, x1;",
        [np.array([np.nan], np.float32), np.array([1], np.float32)],
        [np.float32, np.float32],
    )
    assert got[0][0] == 1 and np.isnan(got[1][0])


@pytest.mark.parametrize(
    "mode, c, fn",
    [
        ("up", 0, lambda i: max(i - 3, i if i < 3 else 0)),
        ("down", 31, lambda i: i + 3 if i + 3 < 32 else i),
        ("bfly", 31, lambda i: i ^ 3),
        ("idx", 31, lambda i: 3),
        ("bfly", 0x1C03, lambda i: i ^ 3),
        ("idx", 0x181F, lambda i: (i & 0x18) | 3),
    ],
)
def test_shfl(mode, c, fn):
    x = words(64)
    got = lanes(f"shfl.sync.{mode}.b32 y0, x0, 3, {c}, -1;", [x], [np.uint32])
    assert got.tolist() == [x[(i & 32) + fn(i & 31)] for i in range(64)]


def test_shfl_predicate_and_partial_mask():
    x = words(32)
    y, p = lanes("shfl.sync.down.b32 y0|%p1, x0, 4, 31, -1; selp.b32 y1, 1, 0, %p1;", [x], [np.uint32, np.uint32])
    assert p.tolist() == [1] * 28 + [0] * 4
    got = lanes(
        "mov.b32 y0, 0; setp.lt.u32 %p1, %t, 16; @!%p1 bra SKIP; shfl.sync.bfly.b32 y0, x0, 1, 31, 0xFFFF; SKIP:",
        [x],
        [np.uint32],
    )
    assert got.tolist() == [x[i ^ 1] for i in range(16)] + [0] * 16


def test_vote_redux_elect_activemask():
    x = words(64)
    odd = (x & 1).astype(bool)
    ballot, every, some = lanes(
        "and.b32 %r1, x0, 1; setp.ne.u32 %p1, %r1, 0; vote.sync.ballot.b32 y0, %p1, -1;"
        "vote.sync.all.pred %p2, %p1, -1; selp.b32 y1, 1, 0, %p2; vote.sync.any.pred %p3, %p1, -1;"
        "selp.b32 y2, 1, 0, %p3;",
        [x],
        [np.uint32] * 3,
    )
    for w in (0, 32):
        o = odd[w : w + 32]
        assert ballot[w] == sum(1 << i for i in range(32) if o[i]) and every[w] == o.all() and some[w] == o.any()
    add, low = lanes("redux.sync.add.s32 y0, x0, -1; redux.sync.min.u32 y1, x0, -1;", [x], [np.uint32] * 2)
    assert add[40] == x[32:].sum(dtype=np.uint32) and low[3] == x[:32].min()
    e = lanes("elect.sync %r1|%p1, -1; selp.b32 y0, 1, 0, %p1;", [x], [np.uint32])
    assert e.tolist() == ([1] + [0] * 31) * 2


def test_unknown_is_refused_with_name_and_line():
    with pytest.raises(emulator.UnsupportedInstruction, match=r"line \d+.*frobnicate.u32 y0, x0.*add one under emulator/ops"):
        lanes("frobnicate.u32 y0, x0;", [words(32)], [np.uint32])
    with pytest.raises(emulator.UnsupportedInstruction, match=r"\.sat"):
        lanes("shl.sat.b32 y0, x0, 1;", [words(32)], [np.uint32])


def test_unknown_that_is_not_reached_does_no_harm():
    x = words(32)
    assert (lanes("mov.b32 y0, x0; bra OVER; frobnicate.u32 y0, x0; OVER:", [x], [np.uint32]) == x).all()
