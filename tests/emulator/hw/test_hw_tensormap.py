"""The tensor map's bits, one field at a time against the table they were read off, and what decode refuses."""

import random
import struct

import pytest

from emulator.hw import HwError, HwUnsupported, tensormap


def words(**kw):
    base = dict(address=0x1000, dtype="bf16", dims=(64, 10), strides=(128,), box=(64, 4))
    return list(struct.unpack("<8Q", tensormap.encode(**base | kw)[:64]))


def pack(w):
    return struct.pack("<8Q", *w) + b"\xa5" * 64  # bytes 64-127 are garbage on real maps


def test_hand_made_map():
    """Every field set by hand: a 3-d f16 map, dims (100, 7, 5), strides 0x1230 and 5 << 36 bytes, box 32 x 2 x 1, 64B
    swizzle, NaN."""
    w = [0] * 8
    w[0] = 0x7F00_0000_0010
    w[1] = 1 << 1 | 2 << 4 | 6 << 7 | 2 << 13 | 1 << 15 | 2 << 17 | 0x123 << 32
    w[2] = 0  # stride 2 is 5 << 36 bytes = 5 << 32 in units of 16: low 32 bits are zero
    w[3] = 5 << 36
    w[4], w[5] = 99 | 6 << 32, 4
    w[6] = 0 << 32 | 1 << 35 | 31 << 56
    w[7] = 1 | 0 << 8
    t = tensormap.decode(pack(w))
    assert t == tensormap.TensorMap(
        0x7F00_0000_0010, "f16", 2, (100, 7, 5), (0x1230, 5 << 36), (32, 2, 1), (1, 2, 1), "64B", "nan"
    )
    assert t.smem_shape == (32, 1, 1) and t.box_bytes == 64 and t.byte_strides == (2, 0x1230, 5 << 36)


def test_round_trip():
    rng = random.Random(5)
    for _ in range(200):
        rank = rng.randint(1, 5)
        code = rng.choice(list(tensormap.ELEMENT_TYPES))
        name, esize = tensormap.ELEMENT_TYPES[code]
        given = dict(
            address=rng.randrange(0, 1 << 57, 16),
            dtype=name,
            dims=tuple(rng.randint(1, 1 << 32) for _ in range(rank)),
            strides=tuple(rng.randrange(16, 1 << 40, 16) for _ in range(rank - 1)),
            box=tuple(rng.randint(1, 256) for _ in range(rank)),
            swizzle=rng.choice(tensormap.SWIZZLES),
            fill=rng.choice(("zero", "nan")),
            estrides=tuple(rng.randint(1, 8) for _ in range(rank)),
        )
        t = tensormap.decode(tensormap.encode(**given), check=False)
        assert {k: getattr(t, k) for k in given} == given and t.esize == esize


@pytest.mark.parametrize("bit, named", [(0, "im2col"), (11, "interleave 16B"), (19, "32B"), (20, "32B\\+flip")])
def test_refused_modes_are_named(bit, named):
    w = words()
    w[1] |= 1 << bit
    with pytest.raises(HwUnsupported, match=named):
        tensormap.decode(pack(w))


def test_tf32_needs_f32():
    assert tensormap.decode(tensormap.encode(address=0, dtype="tf32", dims=(8,), strides=(), box=(8,))).dtype == "tf32"
    w = words()
    w[1] |= 1 << 16
    with pytest.raises(HwError, match="tf32"):
        tensormap.decode(pack(w))


@pytest.mark.parametrize(
    "kw, named",
    [
        (dict(box=(12, 4), dtype="u8"), "inner box extent"),
        (dict(box=(64, 4), swizzle="64B"), "exceeds the 64"),
        (dict(fill="nan", dtype="u16"), "NaN fill"),
    ],
)
def test_illegal_fields_are_named(kw, named):
    with pytest.raises(HwError, match=named):
        tensormap.decode(pack(words(**kw)))


def test_misaligned_address_is_truncated_by_the_writer():
    assert tensormap.decode(pack(words(address=0x1008))).address == 0x1000


def test_short_input():
    with pytest.raises(HwError, match="63 bytes"):
        tensormap.decode(bytes(63))
