"""Tensor memory: ld/st fragments against CuTe and the manual's figures, access rules, the allocator."""

import numpy as np
import pytest

from emulator.hw import HwError, HwUnsupported, tmem

NUMS = (1, 2, 8, 16)


@pytest.mark.parametrize("side", ["dst", "src"])  # what a load writes to registers, what a store reads from them
@pytest.mark.parametrize("num", NUMS)
@pytest.mark.parametrize("shape", tmem.SHAPES)
def test_fragment_is_cutes(cute100, shape, num, side):
    """CuTe numbers the cells of one instruction lane by lane over the columns it touches; its 16x32bx2 splits by .num
    columns."""
    f = tmem.fragment(shape, num, split=num if shape == "16x32bx2" else 0)
    want = cute100[f"tmem/{side}/{shape}/{num}"]
    assert f.lane.shape == (tmem.SHAPES[shape] * num, 32) == want.T.shape
    assert np.array_equal((f.lane * f.columns + f.column).T, want)
    assert f.lanes == (32 if shape == "32x32b" else 16)


def cell(f, t, r):
    return int(f.lane[r, t]), int(f.column[r, t])


def test_fragments_from_the_figures():
    """Cells read off the figures of section "Data Movement Shape", all at a repetition that shows the second group."""
    f = tmem.fragment("32x32b", 2)
    assert cell(f, 0, 0) == (0, 0) and cell(f, 0, 1) == (0, 1) and cell(f, 31, 1) == (31, 1)
    f = tmem.fragment("16x64b", 2)
    assert [cell(f, t, 0) for t in (0, 1, 2, 3, 4, 31)] == [(0, 0), (8, 0), (0, 1), (8, 1), (1, 0), (15, 1)] and cell(
        f, 0, 1
    ) == (0, 2)
    f = tmem.fragment("16x128b", 2)
    assert [cell(f, t, 0) for t in (0, 1, 3, 4, 31)] == [(0, 0), (0, 1), (0, 3), (1, 0), (7, 3)]
    assert cell(f, 0, 1) == (8, 0) and cell(f, 0, 2) == (0, 4)
    f = tmem.fragment("16x256b", 2)
    assert [cell(f, 0, r) for r in range(8)] == [(0, 0), (0, 1), (8, 0), (8, 1), (0, 8), (0, 9), (8, 8), (8, 9)]
    assert cell(f, 3, 1) == (0, 7) and cell(f, 31, 3) == (15, 7)
    f = tmem.fragment("16x32bx2", 2, split=100)
    assert cell(f, 15, 1) == (15, 1) and cell(f, 16, 0) == (0, 100) and cell(f, 31, 1) == (15, 101) and f.columns == 102


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("shape", tmem.SHAPES)
def test_store_then_load(shape, packed):
    rng = np.random.default_rng(0)
    f = tmem.fragment(shape, 4, packed, split=16 if shape == "16x32bx2" else 0)
    cells = list(zip(f.lane.reshape(-1).tolist(), f.column.reshape(-1).tolist()))
    assert len(set(cells)) == f.lane.size
    memory = np.full((2, 128, 512), 0xDEADBEEF, np.uint32)
    regs = rng.integers(0, 1 << 32, (2, *f.lane.shape), dtype=np.uint32)
    taddr = 64 << 16 | 37
    tmem.store(memory, f, taddr, 6, regs)
    assert np.array_equal(tmem.load(memory, f, taddr, 6), regs)
    touched = (memory != 0xDEADBEEF).any(0)
    assert touched.sum() == f.lane.size * (2 if packed else 1)
    assert (
        not touched[:64].any()
        and not touched[64 + f.lanes :].any()
        and not touched[:, 37 + f.columns :].any()
        and not touched[:, :37].any()
    )


def test_packing_pairs_adjacent_columns():
    memory = np.zeros((128, 512), np.uint32)
    memory[3] = np.arange(512) | 0xABCD0000
    assert tmem.load(memory, tmem.fragment("32x32b", 4, packed=True), 8, 0)[:, 3].tolist() == [
        0x90008,
        0xB000A,
        0xD000C,
        0xF000E,
    ]
    f = tmem.fragment("16x256b", 1, packed=True)
    assert f.columns == 16 and tmem.load(memory, f, 0, 0)[:2, 12].tolist() == [0x10000, 0x30002]


def test_quarters():
    f32, f16 = tmem.fragment("32x32b", 1), tmem.fragment("16x64b", 1)
    for warp in range(8):
        lane = 32 * (warp % 4)
        assert tmem.check_access(f32, lane << 16 | 5, warp) == (lane, 5)
        assert tmem.check_access(f16, lane + 16 << 16, warp) == (lane + 16, 0)
        for frag, bad in ((f32, lane + 16), (f16, lane + 8), (f16, (lane + 32) % 128), (f32, (lane + 64) % 128)):
            with pytest.raises(HwError, match=f"warp {warp}, which reaches lanes {lane} to"):
                tmem.check_access(frag, bad << 16, warp)


def test_address_range():
    assert tmem.split_address(0x007F01FF) == (127, 511)
    for bad in (0x00800000, 0x00000200):
        with pytest.raises(HwError, match="accepted lanes 0-127"):
            tmem.split_address(bad)
    with pytest.raises(HwError, match="columns 505 to 512"):
        tmem.check_access(tmem.fragment("16x256b", 1), 505, 0)


@pytest.mark.parametrize("shape, num", [("32x32b", 3), ("32x32b", 256), ("16x256b", 64), ("16x128b", 0), ("8x8b", 1)])
def test_shapes(shape, num):
    with pytest.raises(HwError, match="accepted"):
        tmem.fragment(shape, num)


def test_allocator():
    a = tmem.Allocator()
    assert [a.alloc(n) for n in (128, 32, 256)] == [0, 128, 160]
    assert a.alloc(128) is None and a.alloc(64) == 416
    a.dealloc(128, 32)
    assert a.alloc(64) is None and a.alloc(32) == 128
    assert a.allocated(0, 480) and not a.allocated(470, 32) and not a.allocated(480)
    assert a.leaks() == [(0, 128), (128, 32), (160, 256), (416, 64)]
    a.relinquish()
    with pytest.raises(HwError, match="relinquished"):
        a.alloc(32)
    for start, n in a.leaks():
        a.dealloc(start, n)
    assert a.leaks() == [] and a.describe() == "none"


def test_allocator_errors():
    a = tmem.Allocator()
    for n in (0, 16, 48, 1024):
        with pytest.raises(HwError, match="powers of two from 32 to 512"):
            a.alloc(n)
    a.alloc(64)
    with pytest.raises(HwError, match="never allocated"):
        a.dealloc(64, 64)
    with pytest.raises(HwError, match="allocated were 64"):
        a.dealloc(0, 32)
    a.dealloc(0, 64)
    with pytest.raises(HwError, match="already freed"):
        a.dealloc(0, 64)


def test_refusals():
    for opcode in (
        "tcgen05.cp.cta_group::1.128x256b",
        "tcgen05.shift.cta_group::1.down",
        "tcgen05.alloc.cta_group::2.sync.aligned.b32",
        "tcgen05.ld.red.sync.aligned.32x32b.x2.min.f32",
    ):
        with pytest.raises(HwUnsupported, match="not modelled"):
            tmem.refuse(opcode)
    tmem.refuse("tcgen05.ld.sync.aligned.16x256b.x8.b32")
