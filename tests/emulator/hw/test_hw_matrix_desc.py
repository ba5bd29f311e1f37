"""Matrix descriptors: CuTe's layouts with CuTe's own descriptors, the manual's formulas by hand, and refusals."""

import numpy as np
import pytest

from emulator.hw import HwError, HwUnsupported, matrix_desc, tma
from emulator.hw.matrix_desc import MatrixDesc, operand_addresses

SWIZZLES = ["none", "32B", "64B", "128B"]


def cute_addresses(tables, name, esize):
    """Swizzled byte address of every element when the tile starts at shared address 0: CuTe's layout, CuTe's
    swizzle."""
    mode = name.split("/")[3]
    byte = tables[name] * esize
    atoms = tables[f"swizzle/{mode}"]
    period = atoms.size * 16
    return byte // period * period + atoms[byte % period // 16] + byte % 16


def check(tables, decode, kind, major, mode, shape="64x64"):
    name, esize = f"smem/{kind}/{major}/{mode}/{shape}", 4 if kind == "tf32" else 2
    want, k = cute_addresses(tables, name, esize), 32 // esize
    mn, k_tile = want.shape
    descs = tables[name + "/desc"]
    assert len(descs) == k_tile // k
    for block, word in enumerate(descs):
        desc = decode(int(word))
        assert desc.swizzle == mode
        got = operand_addresses(desc, mn, k, esize, major)
        assert np.array_equal(got, want[:, block * k : (block + 1) * k])


@pytest.mark.parametrize("mode", SWIZZLES)
@pytest.mark.parametrize("major", ["K", "MN"])
def test_wgmma_reads_cutes_layouts(cute90, major, mode):
    check(cute90, matrix_desc.decode_wgmma, "bf16", major, mode)


@pytest.mark.parametrize("mode", SWIZZLES)
@pytest.mark.parametrize("kind, major", [("bf16", "K"), ("bf16", "MN"), ("tf32", "K")])
def test_tcgen05_reads_cutes_layouts(cute100, kind, major, mode):
    check(cute100, matrix_desc.decode_tcgen05, kind, major, mode)


@pytest.mark.parametrize("major, shape", [("K", "128x128"), ("MN", "128x64")])
def test_tcgen05_tiles_of_several_atoms(cute100, major, shape):
    check(cute100, matrix_desc.decode_tcgen05, "bf16", major, "128B", shape)


def test_a_wrong_descriptor_reads_elsewhere(cute90):
    """The comparison can fail: one stride, the swizzle or the major-ness changed."""
    word = int(cute90["smem/bf16/MN/64B/64x64/desc"][1])
    good = matrix_desc.decode_wgmma(word)
    want = cute_addresses(cute90, "smem/bf16/MN/64B/64x64", 2)[:, 16:32]
    for bad, major in (
        (MatrixDesc(good.start, good.lbo + 16, good.sbo, "64B"), "MN"),
        (MatrixDesc(good.start, good.lbo, good.sbo * 2, "64B"), "MN"),
        (MatrixDesc(good.start, good.lbo, good.sbo, "128B"), "MN"),
        (good, "K"),
        (MatrixDesc(good.start + 16, good.lbo, good.sbo, "64B"), "MN"),
    ):
        assert not np.array_equal(operand_addresses(bad, 64, 16, 2, major), want)


def test_by_hand():
    """Formulas of the module docstring at chosen elements; strides unlike those of any CuTe layout."""
    d = MatrixDesc(4096, 512, 3072, "none")
    k = operand_addresses(d, 64, 16, 2, "K")
    assert (k[0, 0], k[1, 0], k[7, 7], k[8, 0], k[0, 8], k[17, 9]) == (
        4096,
        4112,
        4096 + 112 + 14,
        7168,
        4608,
        4096 + 16 + 6144 + 512 + 2,
    )
    mn = operand_addresses(d, 64, 16, 2, "MN")
    assert (mn[1, 0], mn[8, 0], mn[0, 1], mn[0, 8], mn[9, 15]) == (4098, 7168, 4112, 4608, 4096 + 2 + 3072 + 112 + 512)
    s = operand_addresses(MatrixDesc(4096 + 32, 16, 1024, "128B"), 64, 16, 2, "K")
    assert (s[0, 0], s[1, 0], s[5, 8], s[8, 0]) == (
        4128,
        4096 + 128 + (32 ^ 16),
        4096 + 640 + (48 ^ 80),
        4096 + 1024 + 32,
    )
    m = operand_addresses(MatrixDesc(4096, 2048, 1024, "128B"), 128, 16, 2, "MN")
    assert (m[0, 1], m[63, 0], m[64, 0], m[0, 8], m[9, 3]) == (
        4096 + 128 + 16,
        4096 + 126,
        6144,
        5120,
        4096 + 384 + (16 ^ 48) + 2,
    )


@pytest.mark.parametrize(
    "encode, decode",
    [(matrix_desc.encode_wgmma, matrix_desc.decode_wgmma), (matrix_desc.encode_tcgen05, matrix_desc.decode_tcgen05)],
)
def test_round_trip(encode, decode):
    rng = np.random.default_rng(0)
    for mode in SWIZZLES:
        for _ in range(20):
            d = MatrixDesc(*(int(x) * 16 for x in rng.integers(0, 1 << 14, 3)), mode)
            assert decode(encode(d)) == d


def test_fields_at_their_bits():
    assert matrix_desc.decode_wgmma(1 | 2 << 16 | 3 << 32 | 2 << 62) == MatrixDesc(16, 32, 48, "64B")
    assert matrix_desc.decode_tcgen05(1 | 2 << 16 | 3 << 32 | 1 << 46 | 6 << 61) == MatrixDesc(16, 32, 48, "32B")


@pytest.mark.parametrize(
    "word, error, named",
    [
        (0, HwError, "bits 46-48"),
        (1 << 46 | 1 << 55, HwError, "bits 53-60"),
        (1 << 46 | 3 << 61, HwError, "swizzle code 3"),
        (1 << 46 | 1 << 61, HwUnsupported, "32-byte atoms"),
        (1 << 46 | 1 << 52, HwUnsupported, "address mode"),
        (1 << 46 | 1 << 49, HwUnsupported, "base offset 1"),
    ],
)
def test_tcgen05_refusals(word, error, named):
    with pytest.raises(error, match=named):
        matrix_desc.decode_tcgen05(word)


def test_operand_refusals():
    d = MatrixDesc(0, 16, 1024, "32B")
    with pytest.raises(HwUnsupported, match="base offset"):
        matrix_desc.decode_wgmma(2 << 49)
    with pytest.raises(HwUnsupported, match="4-byte"):
        operand_addresses(d, 64, 8, 4, "MN")
    with pytest.raises(HwUnsupported, match="32-byte swizzle span"):
        operand_addresses(d, 64, 32, 2, "K")
    with pytest.raises(HwError, match="accepted"):
        operand_addresses(d, 64, 16, 1, "K")


@pytest.mark.parametrize("mode", SWIZZLES)
@pytest.mark.parametrize("major", ["K", "MN"])
def test_gather_and_units(cute90, major, mode):
    desc = matrix_desc.decode_wgmma(int(cute90[f"smem/bf16/{major}/{mode}/64x64/desc"][2]))
    desc = MatrixDesc(desc.start + 2048, desc.lbo, desc.sbo, desc.swizzle)
    smem = np.zeros(16384, np.uint8)
    addresses = operand_addresses(desc, 64, 16, 2, major)
    smem.view(np.uint16)[addresses // 2] = np.arange(1024).reshape(64, 16)
    assert np.array_equal(matrix_desc.gather_operand(smem, desc, 64, 16, 2, major), np.arange(1024).reshape(64, 16))
    units = matrix_desc.operand_units(desc, 64, 16, 2, major)
    assert len(units) == 128 and set(units.tolist()) == set((addresses & ~15).reshape(-1).tolist())
    with pytest.raises(HwError, match="shared memory"):
        matrix_desc.gather_operand(smem[:4096], desc, 64, 16, 2, major)


def test_tma_box_feeds_the_descriptor(cute90):
    """A [64, 64] bf16 tile loaded by TMA with 128B swizzle is read back whole by the four K blocks of CuTe's
    descriptor."""
    from emulator.hw.tensormap import TensorMap

    tile = np.arange(4096, dtype=np.uint16).reshape(64, 64)
    b = tma.box(TensorMap(0, "bf16", 2, (64, 64), (128,), (64, 64), (1, 1), "128B"), (0, 0), 1024)
    smem = np.zeros(16384, np.uint8)
    smem[b.shared[:, None] + np.arange(b.unit)] = tile.view(np.uint8).reshape(-1)[
        b.global_[:, None] + np.arange(b.unit)
    ]
    for block, word in enumerate(cute90["smem/bf16/K/128B/64x64/desc"]):
        d = matrix_desc.decode_wgmma(int(word))
        d = MatrixDesc(d.start + 1024, d.lbo, d.sbo, d.swizzle)
        assert np.array_equal(
            matrix_desc.gather_operand(smem, d, 64, 16, 2, "K"), tile[:, 16 * block : 16 * block + 16]
        )
