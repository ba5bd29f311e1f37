"""TMA boxes against a byte-by-byte reading of the manual, CuTe's swizzle and smem layouts, and round trips."""

import itertools
import random

import numpy as np
import pytest

from emulator.hw import HwError, HwUnsupported, tensormap, tma
from emulator.hw.tensormap import TensorMap


def naive(t: TensorMap, coords, base):
    """Per element: (global address or None, shared address), straight from the definitions, in box order."""
    out, linear = [], 0
    steps = [range(t.box[0])] + [range(0, t.box[d], t.estrides[d]) for d in range(1, t.rank)]
    for rev in itertools.product(*reversed(steps)):
        pos = [c + s for c, s in zip(coords, reversed(rev))]
        inside = all(0 <= p < n for p, n in zip(pos, t.dims))
        address = t.address + pos[0] * t.esize + sum(p * s for p, s in zip(pos[1:], t.strides))
        shared = base + linear
        row = {"none": 0, "32B": shared // 128 % 2, "64B": shared // 128 % 4, "128B": shared // 128 % 8}[t.swizzle]
        out.append((address if inside else None, shared ^ row * 16))
        linear += t.esize
    return out


def expand(b: tma.Box, esize):
    """The Box's pieces cut into elements, same order."""
    out = []
    for g, s, ok in zip(b.global_.tolist(), b.shared.tolist(), b.valid.tolist()):
        out += [(g + o if ok else None, s + o) for o in range(0, b.unit, esize)]
    return out


CASES = [
    TensorMap(4096, "bf16", 2, (64, 10), (256,), (64, 8), (1, 1), "128B"),
    TensorMap(4096, "bf16", 2, (61, 10), (256,), (64, 8), (1, 1), "128B"),  # the tensor ends inside a 16-byte atom
    TensorMap(1 << 40, "f16", 2, (40, 9, 3), (96, 1024), (32, 4, 2), (1, 1, 1), "64B"),
    TensorMap(0, "u8", 1, (200,), (), (32,), (1,), "none"),
    TensorMap(16, "f32", 4, (33, 5, 4, 3), (160, 800, 3200), (8, 3, 2, 2), (1, 1, 1, 1), "32B"),
    TensorMap(16, "f32", 4, (33, 9, 4, 3, 2), (160, 1600, 6400, 19200), (16, 5, 2, 3, 1), (1, 2, 1, 3, 1), "none"),
    TensorMap(64, "f64", 8, (7, 6), (64,), (2, 6), (1, 3), "none"),
]


@pytest.mark.parametrize("t", CASES, ids=lambda t: f"{t.dtype}-{t.rank}d-{t.swizzle}")
def test_box_against_the_definition(t):
    rng = random.Random(1)
    for _ in range(12):
        coords = [rng.randint(-b, d) for b, d in zip(t.box, t.dims)]
        coords[0] = coords[0] * t.esize // 16 * 16 // t.esize
        base = 128 * rng.randint(0, 30)
        b = tma.box(t, coords, base)
        assert expand(b, t.esize) == naive(t, coords, base)
        assert b.nbytes == t.box_bytes == len(b.shared) * b.unit
        assert b.all_valid == b.valid.all() and len(b.fill) == b.unit


def test_coordinates_are_signed_32_bit():
    t = CASES[0]
    assert expand(tma.box(t, (np.uint32(2**32 - 8), 0), 0), 2) == naive(t, (-8, 0), 0)


def test_unit_is_sixteen_bytes_when_it_can_be():
    assert tma.box(CASES[0], (0, 5), 0).unit == 16 and tma.box(CASES[0], (-8, 0), 0).unit == 16
    assert tma.box(CASES[1], (0, 0), 0).unit == 2  # an edge of the tensor inside the piece


@pytest.mark.parametrize("mode", ["none", "32B", "64B", "128B"])
def test_swizzle_is_cutes(cute90, mode):
    addresses = np.arange(0, 8192, 16)
    assert np.array_equal(tma.swizzle(addresses, mode), cute90[f"swizzle/{mode}"])
    assert np.array_equal(tma.swizzle(tma.swizzle(addresses + 5, mode), mode), addresses + 5)
    pattern = tma.PATTERN_BYTES[mode]
    moved = tma.swizzle(addresses, mode) != addresses
    assert (mode == "none") != moved.any()
    assert np.array_equal(tma.swizzle(addresses + pattern, mode), tma.swizzle(addresses, mode) + pattern)


@pytest.mark.parametrize("mode, width", [("32B", 16), ("64B", 32), ("128B", 64)])
def test_box_lands_on_cutes_smem_layout(cute90, mode, width):
    """A box of 64 rows by one swizzle span of bf16 fills the first `width` columns of CuTe's K-major layout of that
    swizzle."""
    t = TensorMap(0, "bf16", 2, (64, 64), (128,), (width, 64), (1, 1), mode)
    b = tma.box(t, (0, 0), 2048)
    shared = np.array([s for _, s in expand(b, 2)]).reshape(64, width)
    outer = cute90[f"smem/bf16/K/{mode}/64x64"][:, :width]
    swizzled = cute90[f"swizzle/{mode}"][outer * 2 // 16] + outer * 2 % 16  # CuTe's own swizzle of the byte offset
    assert np.array_equal(shared, 2048 + swizzled)


def copy(b: tma.Box, dst, dst_at, src, src_at, keep):
    lane = np.arange(b.unit)
    dst[(dst_at[keep, None] + lane)] = src[(src_at[keep, None] + lane)]


@pytest.mark.parametrize(
    "t", [c for c in CASES if c.address < 1 << 20], ids=lambda t: f"{t.dtype}-{t.rank}d-{t.swizzle}"
)
def test_store_of_load_is_identity_and_clipped(t):
    rng = np.random.default_rng(2)
    size = t.address + t.dims[0] * t.esize + sum((d - 1) * s for d, s in zip(t.dims[1:], t.strides)) + 64
    memory, smem = rng.integers(0, 256, size, dtype=np.uint8), np.full(65536, 0xEE, np.uint8)
    coords = [max(0, d - b // 2 - 1) for d, b in zip(t.dims, t.box)]
    coords[0] = coords[0] * t.esize // 16 * 16 // t.esize
    b = tma.box(t, coords, 1024)
    smem[b.shared[:, None] + np.arange(b.unit)] = np.frombuffer(b.fill, np.uint8)
    copy(b, smem, b.shared, memory, b.global_, b.valid)
    assert (smem[:1024] == 0xEE).all() and (smem[1024 + b.nbytes :] == 0xEE).all()
    back = np.zeros_like(memory)
    copy(b, back, b.global_, smem, b.shared, b.valid)
    touched = np.zeros(size, bool)
    for g, _ in naive(t, coords, 1024):
        if g is not None:
            touched[g : g + t.esize] = True
    assert touched.any() and np.array_equal(back[touched], memory[touched]) and not back[~touched].any()


def test_fill():
    """The NaN's bits as measured on an H200."""
    for dtype, size in (("f16", 2), ("bf16", 2), ("f32", 4)):
        t = TensorMap(0, dtype, size, (8, 2), (32,), (16, 2), (1, 1), "none", "nan")
        assert set(np.frombuffer(tma.box(t, (16 // size, 0), 0).fill, np.uint16)) == {0x7FF7}
    assert tma.fill_pattern(CASES[0], 4) == bytes(4)


def test_illegal_coordinates():
    """Measured on an H200: an illegal instruction; the same box may be loaded from negative coordinates."""
    t = CASES[0]
    for c0 in (1, -4, 3):
        with pytest.raises(HwError, match="multiples of 16 bytes"):
            tma.box(t, (c0, 0), 0)
    for coords in ((-8, 0), (0, -1)):
        tma.box(t, coords, 0)
        with pytest.raises(HwError, match="in a store"):
            tma.box(t, coords, 0, store=True)


def test_refusals():
    t = CASES[0]
    with pytest.raises(HwError, match="rank 2"):
        tma.box(t, (0,), 0)
    with pytest.raises(HwError, match="multiples of 128"):
        tma.box(t, (0, 0), 64)
    narrow = TensorMap(0, "bf16", 2, (64, 8), (128,), (32, 8), (1, 1), "128B")
    with pytest.raises(HwUnsupported, match="row pitch"):
        tma.box(narrow, (0, 0), 0)
    with pytest.raises(HwUnsupported, match="convert"):
        tma.box(TensorMap(0, "tf32", 4, (8,), (), (8,), (1,)), (0,), 0)
    for opcode in (
        "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes",
        "cp.async.bulk.tensor.2d.shared::cta.global.tile::gather4.mbarrier::complete_tx::bytes",
        "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group",
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster",
    ):
        with pytest.raises(HwUnsupported):
            tma.check_tensor_variant(opcode)
    tma.check_tensor_variant(
        "cp.async.bulk.tensor.4d.shared::cta.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint"
    )
    tma.bulk_copy(16, 32, 48)
    for bad in ((8, 0, 16), (0, 8, 16), (0, 0, 8), (0, 0, 0)):
        with pytest.raises(HwError, match="cp.async.bulk"):
            tma.bulk_copy(*bad)


def test_decoded_map_gives_the_same_box():
    t = CASES[2]
    raw = tensormap.encode(
        address=t.address, dtype=t.dtype, dims=t.dims, strides=t.strides, box=t.box, swizzle=t.swizzle
    )
    assert expand(tma.box(tensormap.decode(raw), (8, 1, 0), 512), 2) == naive(t, (8, 1, 0), 512)
