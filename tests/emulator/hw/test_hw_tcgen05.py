"""tcgen05.mma: instruction descriptors from real PTX, accumulator and A layouts against CuTe, products against
matmul."""

import numpy as np
import pytest

from emulator.hw import HwError, HwUnsupported, tcgen05, tmem
from emulator.hw.numerics import dot_accumulate, to_bf16_bits, widen
from emulator.hw.tcgen05 import InstrDesc


@pytest.mark.parametrize(
    "name, want",
    [
        ("bf16/64x128/KMN", InstrDesc(64, 128, 16, "bf16", "bf16", major_b="MN")),
        ("f16/128x64/MNK", InstrDesc(128, 64, 16, "f16", "f16", major_a="MN")),
        ("tf32/128x256/KK", InstrDesc(128, 256, 8, "tf32", "tf32")),
    ],
)
def test_descriptors_of_compiled_kernels(cute100, name, want):
    word = int(cute100[f"idesc/{name}"])
    kind = tcgen05.check_variant(str(cute100[f"idesc/{name}/opcode"]))
    assert tcgen05.decode_idesc(word, kind) == want and tcgen05.encode_idesc(want) == word


def test_descriptor_fields_at_their_bits():
    word = 1 << 4 | 1 << 7 | 1 << 10 | 1 << 13 | 1 << 15 | 5 << 17 | 4 << 24
    assert tcgen05.decode_idesc(word, "f16") == InstrDesc(64, 40, 16, "bf16", "bf16", True, False, "MN", "K")
    assert tcgen05.decode_idesc(word ^ 3 << 13 ^ 3 << 15, "f16") == InstrDesc(
        64, 40, 16, "bf16", "bf16", False, True, "K", "MN"
    )


def test_round_trip():
    for m, n in ((64, 8), (64, 248), (128, 16), (128, 256)):
        for t, k in (("bf16", 16), ("f16", 16), ("tf32", 8)):
            for bits in range(16):
                d = InstrDesc(
                    m, n, k, t, t, bool(bits & 1), bool(bits & 2), "MN" if bits & 4 else "K", "MN" if bits & 8 else "K"
                )
                assert tcgen05.decode_idesc(tcgen05.encode_idesc(d), "tf32" if t == "tf32" else "f16") == d


GOOD = tcgen05.encode_idesc(InstrDesc(128, 64, 16, "bf16", "bf16"))


@pytest.mark.parametrize(
    "word, kind, error, named",
    [
        (GOOD | 1 << 2, "f16", HwUnsupported, "sparse"),
        (GOOD, "f8f6f4", HwUnsupported, "kind f8f6f4"),
        (GOOD ^ 1 << 4, "f16", HwUnsupported, "D type code 0"),
        (GOOD ^ 3 << 4, "f16", HwError, "D type code 2"),
        (GOOD ^ 1 << 7, "f16", HwUnsupported, "A of f16 with B of bf16"),
        (GOOD, "tf32", HwError, "operand type code 1"),
        (GOOD | 1 << 23, "f16", HwError, "bits 0x800000"),
        (GOOD | 1 << 17, "f16", HwError, "multiples of 16"),
        (GOOD ^ 24 << 24, "f16", HwError, "M = 256"),
        (GOOD & ~(63 << 17), "f16", HwError, "N = 0"),
    ],
)
def test_descriptor_refusals(word, kind, error, named):
    with pytest.raises(error, match=named):
        tcgen05.decode_idesc(word, kind)


@pytest.mark.parametrize("m, n", [(64, 32), (64, 64), (64, 128), (128, 64), (128, 128)])
def test_accumulator_is_cutes(cute100, m, n):
    """CuTe's fp32 accumulator fragment holds tensor-memory addresses, lane << 16 | column."""
    lanes, columns = tcgen05.d_cells(0, m, n)
    assert np.array_equal(lanes[:, None] << 16 | np.arange(n)[None, columns], cute100[f"acc/{m}x{n}"])


@pytest.mark.parametrize("m", [64, 128])
def test_a_in_tensor_memory_is_cutes(cute100, m):
    """CuTe counts A's tensor memory in 16-bit elements: 2^17 a lane, two a column; K = 64 is four instructions of 8
    columns."""
    want = cute100[f"tmem_a/{m}"]
    memory = np.zeros((128, 512), np.uint32)
    halves = memory.view(np.uint16).reshape(128, 1024)
    halves[want >> 17, want & 0x1FFFF] = np.arange(m * 64).reshape(m, 64)
    for block in range(4):
        assert np.array_equal(
            tcgen05.read_a(memory, 8 * block, m, "bf16"),
            np.arange(m * 64).reshape(m, 64)[:, 16 * block : 16 * block + 16],
        )


LOADS = [
    (64, 64, "16x256b", 8),
    (64, 128, "16x256b", 4),
    (128, 64, "32x32b", 16),
    (128, 128, "32x32b", 32),
    (64, 32, "16x64b", 16),
    (64, 64, "16x128b", 16),
]


@pytest.mark.parametrize("m, n, shape, num", LOADS)
def test_loads_of_an_accumulator_are_cutes(cute100, m, n, shape, num):
    """Write D through d_cells, load it warp by warp with ld fragments: each thread sees the D elements CuTe says it
    does."""
    want = cute100[f"load/{m}x{n}/{shape}/{num}"]  # [thread, value, (row, column)]
    d = np.arange(m * n, dtype=np.float32).reshape(m, n)
    memory = np.zeros((128, 512), np.uint32)
    tcgen05.write_d(memory, 64, d)
    f = tmem.fragment(shape, num)
    for warp in range(4):
        regs = np.concatenate([tmem.load(memory, f, 32 * warp << 16 | 64 + c, warp) for c in range(0, n, f.columns)])
        got = regs.view(np.float32).T
        assert np.array_equal(got, d[tuple(want[32 * warp : 32 * warp + 32].transpose(2, 0, 1))])


@pytest.mark.parametrize(
    "m, shape, num", [(128, "32x32b", 16), (64, "16x256b", 2), (64, "16x64b", 4), (64, "16x128b", 4)]
)
def test_packed_loads_are_cutes(cute100, m, shape, num):
    """An fp16 matrix stored one element a column, low half, as CuTe lays it out; .pack::16b brings pairs."""
    want = cute100[f"packed/{m}/{shape}/{num}"]  # [thread, fp16 value, (row, column)]
    place = cute100[f"acc16/{m}x64"]  # in 16-bit units: 2^17 a lane, two a column
    d = np.arange(m * 64, dtype=np.uint16).reshape(m, 64)
    memory = np.full((128, 512), 0xFFFFFFFF, np.uint32)
    memory.view(np.uint16).reshape(128, 1024)[place >> 17, place & 0x1FFFF] = d
    f = tmem.fragment(shape, num, packed=True)
    for warp in range(4):
        regs = np.concatenate([tmem.load(memory, f, 32 * warp << 16 | c, warp) for c in range(0, 64, f.columns)])
        got = np.ascontiguousarray(regs.T).view(np.uint16)
        assert np.array_equal(got, d[tuple(want[32 * warp : 32 * warp + 32].transpose(2, 0, 1))])


def test_layouts_from_the_figures():
    """Layout D: row i in lane i. Layout F: rows 0-15, 16-31, 32-47, 48-63 in lanes 0-15, 32-47, 64-79, 96-111."""
    assert tcgen05.d_cells(7, 128, 16)[0].tolist() == list(range(128)) and tcgen05.d_cells(7, 128, 16)[1] == slice(
        7, 23
    )
    f = [*range(16), *range(32, 48), *range(64, 80), *range(96, 112)]
    assert tcgen05.d_cells(0, 64, 8)[0].tolist() == f and tcgen05.d_cells(16 << 16, 64, 8)[0].tolist() == [
        x + 16 for x in f
    ]


def test_two_halves_do_not_meet():
    memory = np.zeros((128, 512), np.uint32)
    low, high = np.full((64, 16), 1.0, np.float32), np.full((64, 16), 2.0, np.float32)
    tcgen05.write_d(memory, 0, low)
    tcgen05.write_d(memory, 16 << 16, high)
    assert np.array_equal(tcgen05.read_d(memory, 0, 64, 16), low) and np.array_equal(
        tcgen05.read_d(memory, 16 << 16, 64, 16), high
    )
    assert np.count_nonzero(memory) == 128 * 16


@pytest.mark.parametrize(
    "taddr, m, n, named",
    [(16 << 16, 128, 16, "lane 16"), (8 << 16, 64, 16, "0 or 16"), (500, 128, 16, "columns 500 to 515")],
)
def test_accumulator_range(taddr, m, n, named):
    with pytest.raises(HwError, match=named):
        tcgen05.d_cells(taddr, m, n)


def test_disabled_lanes_keep_their_value():
    memory = np.zeros((128, 512), np.uint32)
    tcgen05.write_d(memory, 0, np.ones((64, 8), np.float32), disable=1 << 3 | 1 << 40)
    rows = np.flatnonzero(~tcgen05.read_d(memory, 0, 64, 8).any(1))
    assert rows.tolist() == [3, 24]  # lane 40 is row 16 + 8


@pytest.mark.parametrize("m, n, kind", [(64, 40, "bf16"), (128, 32, "f16"), (128, 16, "tf32")])
def test_mma(m, n, kind):
    rng = np.random.default_rng(4)
    k = 8 if kind == "tf32" else 16
    raw = {
        "bf16": to_bf16_bits,
        "f16": lambda x: x.astype(np.float16).view(np.uint16),
        "tf32": lambda x: x.view(np.uint32),
    }[kind]
    a, b = (raw(rng.standard_normal(s).astype(np.float32)) for s in ((2, m, k), (2, n, k)))
    d = rng.standard_normal((2, m, n)).astype(np.float32)
    av, bv = widen(a, kind), widen(b, kind)
    product = av.astype(np.float64) @ bv.swapaxes(1, 2).astype(np.float64)
    desc = InstrDesc(m, n, k, kind, kind)
    negated = InstrDesc(m, n, k, kind, kind, negate_a=True)
    assert np.array_equal(tcgen05.mma(a, b, d, desc), dot_accumulate(av, bv.swapaxes(1, 2), d, kind))
    assert np.allclose(tcgen05.mma(a, b, d, desc), product + d, rtol=0, atol=2e-5)
    assert np.allclose(tcgen05.mma(a, b, d, negated), d - product, rtol=0, atol=2e-5)
    assert np.allclose(tcgen05.mma(a, b, np.full_like(d, np.nan), desc, accumulate=False), product, rtol=0, atol=2e-5)
    with pytest.raises(HwError, match="accepted"):
        tcgen05.mma(a, b[:, :8], d, desc)


@pytest.mark.parametrize(
    "opcode, named",
    [
        ("tcgen05.mma.ws.cta_group::1.kind::f16", "ws"),
        ("tcgen05.mma.sp.cta_group::1.kind::f16", "sp"),
        ("tcgen05.mma.cta_group::2.kind::f16", "cta_group::2"),
        ("tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale", "block_scale"),
        ("tcgen05.mma.cta_group::1.kind::i8", "i8"),
    ],
)
def test_variants(opcode, named):
    with pytest.raises(HwUnsupported, match=named):
        tcgen05.check_variant(opcode)
    assert tcgen05.check_variant("tcgen05.mma.cta_group::1.kind::f16.collector::a::discard") == "f16"
