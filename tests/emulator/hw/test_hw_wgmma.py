"""wgmma: fragments against CuTe and the figures, products against matmul; the fragments of mma.sync against CuTe."""

import numpy as np
import pytest

from emulator.hw import HwError, HwUnsupported, wgmma
from emulator.hw.numerics import dot_accumulate, to_bf16_bits, widen


@pytest.mark.parametrize("n", [8, 64, 128, 256])
def test_d_fragment_is_cutes(cute90, n):
    row, col = wgmma.d_layout(n)
    assert np.array_equal((row + 64 * col).T, cute90[f"wgmma/D/{n}"])


def test_a_fragment_is_cutes(cute90):
    row, k = wgmma.a_layout("bf16")
    assert np.array_equal((row + 64 * k).T, cute90["wgmma/A"])


def test_fragments_from_the_figures():
    """Cells read off the figures of m64nNk16 D and A and of m64nNk8 A (tf32): thread 0, 1, 4, 31, 32, 127."""
    row, col = wgmma.d_layout(16)
    at = lambda t, i: (int(row[i, t]), int(col[i, t]))
    assert [at(0, i) for i in range(8)] == [(0, 0), (0, 1), (8, 0), (8, 1), (0, 8), (0, 9), (8, 8), (8, 9)]
    assert (
        at(1, 0) == (0, 2)
        and at(4, 0) == (1, 0)
        and at(31, 3) == (15, 7)
        and at(32, 0) == (16, 0)
        and at(127, 7) == (63, 15)
    )
    row, k = wgmma.a_layout("bf16")
    assert [(int(row[e, 5]), int(k[e, 5])) for e in range(8)] == [
        (1, 2),
        (1, 3),
        (9, 2),
        (9, 3),
        (1, 10),
        (1, 11),
        (9, 10),
        (9, 11),
    ]
    row, k = wgmma.a_layout("tf32")
    assert [(int(row[e, 38]), int(k[e, 38])) for e in range(4)] == [(17, 2), (25, 2), (17, 6), (25, 6)]


@pytest.mark.parametrize("n", [8, 72, 256])
def test_every_cell_once(n):
    row, col = wgmma.d_layout(n)
    assert len(set((row * n + col).reshape(-1).tolist())) == 64 * n
    for kind in wgmma.K:
        row, k = wgmma.a_layout(kind)
        assert len(set((row * 16 + k).reshape(-1).tolist())) == 64 * wgmma.K[kind]


@pytest.mark.parametrize("out, dtype", [("f32", np.float32), ("f16", np.float16)])
def test_d_round_trip(out, dtype):
    x = np.random.default_rng(0).standard_normal((2, 64, 40)).astype(dtype)
    regs = wgmma.matrix_to_d(x, out)
    assert regs.shape == (2, 20 if out == "f32" else 10, 128) and np.array_equal(wgmma.d_to_matrix(regs, 40, out), x)


def test_a_registers_hold_pairs_low_half_first():
    regs = np.zeros((4, 128), np.uint32)
    regs[1, 33] = 0x22221111  # warp 1, group 0, quad 1: row 16 + 8, k 2 and 3
    a = wgmma.a_to_matrix(regs, "bf16")
    assert a[24, 2] == 0x1111 and a[24, 3] == 0x2222 and np.count_nonzero(a) == 2


@pytest.mark.parametrize("kind", ["bf16", "f16", "tf32"])
def test_mma(kind):
    rng = np.random.default_rng(1)
    k, n = wgmma.K[kind], 24
    raw = lambda shape: {
        "bf16": lambda x: to_bf16_bits(x),
        "f16": lambda x: x.astype(np.float16).view(np.uint16),
        "tf32": lambda x: x.view(np.uint32),
    }[kind](rng.standard_normal(shape).astype(np.float32))
    a, b, d = raw((64, k)), raw((n, k)), rng.standard_normal((64, n)).astype(np.float32)
    av, bv = widen(a, kind), widen(b, kind)
    product = av.astype(np.float64) @ bv.T.astype(np.float64)
    near = lambda got, want: np.allclose(got, want, rtol=0, atol=2e-5) and not np.allclose(want, 0)
    assert near(wgmma.mma(a, b, d, kind), product + d)
    assert near(wgmma.mma(a, b, np.full_like(d, np.nan), kind, scale_d=False), product)
    assert near(wgmma.mma(a, b, d, kind, scale_a=-1), d - product) and near(
        wgmma.mma(a, b, d, kind, scale_b=-1), d - product
    )
    assert near(wgmma.mma(a, b, d, kind, scale_a=-1, scale_b=-1), product + d)
    assert np.array_equal(wgmma.mma(a, b, d, kind), dot_accumulate(av, bv.T, d, kind))


@pytest.mark.parametrize(
    "args, error",
    [
        ((12, "bf16"), HwError),
        ((264, "bf16"), HwError),
        ((64, "e4m3"), HwUnsupported),
        ((64, "bf16", "f16"), HwError),
        ((64, "tf32", "f32", 1, 0), HwError),
    ],
)
def test_checks(args, error):
    with pytest.raises(error, match="wgmma"):
        wgmma.check(*args)
    wgmma.check(64, "f16", "f16", 1, 1)


def test_imm_scale():
    z = np.zeros((64, 16), np.uint16)
    with pytest.raises(HwError, match="imm-scale-a 0"):
        wgmma.mma(z, z, None, "bf16", scale_d=False, scale_a=0)


@pytest.mark.parametrize(
    "k, bits, name", [(16, 16, "warp"), (8, 16, "warp/k8"), (8, 32, "warp/tf32k8"), (4, 32, "warp/tf32k4")]
)
def test_mma_sync_fragments_are_cutes(cute90, k, bits, name):
    """The engine's mma.sync handler has its own index arrays, [lane, element]; CuTe numbers A row + 16 k, B n + 8 k."""
    from emulator.ops.mma import _fragment

    (row, col), (rows, n), (c_row, c_col) = _fragment(k, bits)
    assert np.array_equal(row + 16 * col, cute90[f"{name}/A"])
    assert np.array_equal(n + 8 * rows, cute90[f"{name}/B"])
    assert np.array_equal(c_row + 16 * c_col, cute90["warp/C"])
