"""The way of a capture, with the emulator as the device: recorded, filed, replayed, compared; every flaw put into it is seen."""

import ctypes
import json
import re

import capture
import fixture_files
import numpy as np
import pytest
import stage_compare
import stage_recorder
from fixture_files import Arrays, Fixture, FixtureError
from programs import everything, uncovered
from stage_replay import fixed, names

NAMES = {
    "programs barriers": ["mbarrier phases", "mbarrier ring"],
    "programs functions": ["ex2.approx.ftz.f32", "no such program", "rcp.rn.f32"],
    "programs tensor_copies": [n for n in everything() if ".2d load bf16 box 64x8 at 64,15" in n],
    "rungs small_k128/mixed/pre": ["002-cute-fused"],
}


@pytest.fixture(scope="module")
def captured(tmp_path_factory):
    """Programs of three modules, one of them unknown, and a rung of Triton kernels and a CuTe unit; as `run` leaves it."""
    return capture.run(tmp_path_factory.mktemp("capture") / "out", emulated=True, wanted=NAMES)


@pytest.fixture(scope="module")
def filed(captured, tmp_path_factory):
    return Fixture(capture.file(captured, tmp_path_factory.mktemp("filed") / "fixtures"))


def stages(fixture):
    return [(rung, stage) for rung in fixture.index["rungs"] for stage in rung["stages"]]


def complaints(fixture):
    """Of every program and stage."""
    found = {}
    for name in fixture.index["programs"]:
        found[name] = capture.compare_program(name, fixture)
    for rung, stage in stages(fixture):
        for row in stage_compare.compare(rung, stage, fixture):
            found[stage["name"], row.tensor] = row.complaint
    return {k: v for k, v in found.items() if v}


def test_one_items_failure_is_told_and_ends_nothing_else(captured):
    record = json.loads((captured / "record.json").read_text())
    assert list(record["failed"]) == ["programs functions: no such program"]
    assert "KeyError" in record["failed"]["programs functions: no such program"]
    assert record["programs"] == 6 and record["stages"] == 5
    assert record["device"]["name"] == "emulator" and record["versions"]["torch"] and len(record["code_hash"]) == 16
    assert all((captured / name).stat().st_size < fixture_files.LARGEST for name in record["files"])
    assert len(list(captured.iterdir())) == 4


def test_what_was_recorded_is_what_the_emulator_does(filed):
    assert complaints(filed) == {}
    assert {k for _, s in stages(filed) for b in s["buffers"] for k in names(b)} >= {
        "q",
        "k",
        "v",
        "beta",
        "g2",
        "Aqk",
        "Akk",
        "w",
        "u",
        "o",
    }
    units = [x for _, s in stages(filed) for x in s["launches"] if "kda_state" in x["kernel"]]
    assert len(units) == 1 and units[0]["relocations"]
    places = [line for text in filed.index["ptx"].values() for line in text.split("\n") if line.strip().startswith(".file")]
    assert places and all(line.count("/") == 1 for line in places)
    assert not any(".section" in text for text in filed.index["ptx"].values())


def test_every_instruction_that_is_not_plain_has_a_program(filed):
    assert uncovered(filed.index["ptx"].values()) == []
    odd = (
        "L: @%p1 tanh.approx.f16 %h1, %h2; { add.s64 %rd1, %rd2, %rd3; } ex2.approx.ftz.f32 %f1, %f2; // sin.approx.f32 %f1, %f2;"
    )
    assert uncovered([odd]) == ["tanh.approx.f16"]


def test_which_stages_are_compared_bit_for_bit(filed):
    """Those whose order of instructions decides: the gate's sums, the fill above the diagonal, nothing with a tensor core."""
    state = next(s for _, s in stages(filed) if s["name"] == "state")
    zero = next(x for x in state["launches"] if "zero_upper" in x["kernel"])
    assert fixed({**state, "launches": [zero]}, filed) is None
    assert {s["name"] for _, s in stages(filed) if s["launches"] and fixed(s, filed)} == {"intra", "wu", "state"}


def test_a_program_is_kept_whole(filed):
    """Text, launch, inputs and maps: what the table makes later need not be what ran."""
    for name in filed.index["programs"]:
        kept, made = capture.kept_program(name, filed)[0], everything()[name]
        assert (kept.text, kept.block, kept.grid, dict(kept.maps)) == (made.text, made.block, made.grid, dict(made.maps))
        assert {n: x.tobytes() for n, x in kept.inputs.items()} == {n: x.tobytes() for n, x in made.inputs.items()}
        assert kept.compare is made.compare


def flipped(fixture, part, ref, byte, bit):
    """The array of `ref` with one bit flipped, as a new reference."""
    x = fixture.arrays[part].get(ref)
    x.reshape(-1).view(np.uint8)[byte] ^= 1 << bit
    return fixture.arrays[part].put(x, ref["dtype"])


@pytest.mark.parametrize("name", ["mbarrier phases", "rcp.rn.f32", *NAMES["programs tensor_copies"]])
def test_one_bit_of_a_program_is_seen(filed, name):
    answer = filed.index["programs"][name]
    kept = answer["outputs"]["y"]
    try:
        answer["outputs"]["y"] = flipped(filed, "programs", kept, 4 * 3 + 1, 0)
        assert "1 of" in capture.compare_program(name, filed)
    finally:
        answer["outputs"]["y"] = kept


def test_an_approximation_outside_its_documented_error_is_seen(filed):
    """Two units in the last place are allowed: four are not, one is."""
    answer = filed.index["programs"]["ex2.approx.ftz.f32"]
    kept = answer["outputs"]["y"]
    try:
        for bit, seen in ((0, False), (2, True)):
            answer["outputs"]["y"] = flipped(filed, "programs", kept, 4 * 5000, bit)
            assert bool(capture.compare_program("ex2.approx.ftz.f32", filed)) is seen
    finally:
        answer["outputs"]["y"] = kept


def test_a_tensor_map_of_other_fields_is_seen(filed):
    (name,) = NAMES["programs tensor_copies"][:1]
    maps = filed.index["programs"][name]["maps"]
    kept = maps["map"]
    try:
        raw = bytearray.fromhex(kept)
        raw[9] ^= 1 << 5  # the swizzle's code
        maps["map"] = raw.hex()
        assert "swizzle" in capture.compare_program(name, filed)
    finally:
        maps["map"] = kept


@pytest.mark.parametrize("tensor, byte, bit", [("o", 1, 6), ("final_state", 4 * 77 + 3, 4), ("Aqk", 2 * 63, 0), ("w", 11, 3)])
def test_one_bit_of_a_stage_is_seen(filed, tensor, byte, bit):
    """Of an output a bit that leaves its ball; of an input that a kernel fills or reads, any bit."""
    rung, stage = next((r, s) for r, s in stages(filed) if s["name"] == "state")
    buffer = next(b for b in stage["buffers"] if tensor in names(b))
    kept = buffer["after"]
    try:
        buffer["after"] = flipped(filed, "stages", kept, byte, bit)
        found = [r for r in stage_compare.compare(rung, stage, filed) if r.complaint]
        assert [r.tensor for r in found] == [tensor] and ("element" in found[0].complaint)
    finally:
        buffer["after"] = kept


@pytest.mark.parametrize("stage_name, old, new, seen", [
    ("wu", r"ex2\.approx\.ftz\.f32", "mov.b32", {"kg"}),  # one decay that is none
    ("gate", r"add\.f32", "sub.f32", {"g2"}),  # one sign
    ("state", r"(?s)(.*), p, 1,(\s+)1, ", r"\1, p, -1,\2 1, ", {"o", "final_state"}),  # the last product taken negative
])  # fmt: skip
def test_one_wrong_instruction_is_seen(filed, stage_name, old, new, seen):
    """The stage is repeated with one instruction of its PTX exchanged, as a wrong emulator would run it."""
    rung, stage = next((r, s) for r, s in stages(filed) if s["name"] == stage_name)
    key, texts = stage["launches"][-1]["ptx"], filed.index["ptx"]
    kept = texts[key]
    try:
        texts[key] = re.sub(old, new, kept, count=1)
        assert texts[key] != kept
        found = {r.tensor for r in stage_compare.compare(rung, stage, filed) if r.complaint}
        assert found and found <= seen | {"w", "u", "qg", "kg"}, found
    finally:
        texts[key] = kept


def test_a_damaged_file_is_no_fixture(captured, tmp_path):
    for path in captured.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    raw = bytearray((tmp_path / "programs.npz.xz").read_bytes())
    raw[-9] ^= 1
    (tmp_path / "programs.npz.xz").write_bytes(raw)
    with pytest.raises(FixtureError, match="programs.npz.xz is not the file"):
        Fixture(tmp_path)
    with pytest.raises(FixtureError, match="no whole capture"):
        Fixture(tmp_path / "nowhere")


def test_a_capture_of_the_emulator_is_not_filed_as_the_hardwares(captured):
    with pytest.raises(FixtureError, match="proves nothing"):
        capture.file(captured)
    assert not fixture_files.present() or not Fixture(fixture_files.FOLDER).record["emulated"]


def test_a_unit_of_other_code_is_not_taken_for_the_one_that_ran(captured):
    fixture = Fixture(captured)
    _, stage = next((r, s) for r, s in stages(fixture) if s["name"] == "state")
    call = next(x for x in stage["launches"] if "unit" in x)
    call["unit"]["key"] += "0"
    with pytest.raises(RuntimeError, match="compiled from other code"):
        stage_recorder.resolve(call, stage["buffers"])


def test_relocations():
    block = (7).to_bytes(8, "little") + (1040).to_bytes(8, "little") + (2000).to_bytes(8, "little") + bytes(3)
    assert stage_recorder.relocations(block, [(1000, 64), (2000, 8)], [3, 5]) == [[8, 3, 40], [16, 5, 0]]


def test_arrays_are_kept_once():
    arrays = Arrays()
    a, b = arrays.put(np.arange(6, dtype=np.float32).reshape(2, 3)), arrays.put(np.arange(6, dtype=np.float32))
    assert a["array"] == b["array"] and len(arrays.held) == 1 and arrays.get(a).shape == (2, 3)


def test_a_process_that_dies_is_told_for_the_item_it_had(tmp_path):
    """Without a driver the real device's process dies at its start, once for each item."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        items = ["mbarrier phases", "mbarrier ring"]
        capture.supervise("programs barriers", items, tmp_path / "out", emulated=False)
        left = [json.loads(p.read_text()) for p in sorted((tmp_path / "out").glob("*.json"))]
        assert [x["item"] for x in left] == items and all("libcuda" in x["failed"] for x in left)
    else:
        pytest.skip("this machine has a CUDA driver")


@pytest.mark.slow
@pytest.mark.parametrize("cell", list(capture.cells()))
def test_every_rung_in_the_emulator_lies_in_its_balls(cell, tmp_path):
    """And repeats bit for bit what was recorded, in every gate regime and both forms."""
    wanted = capture.jobs(f"rungs {cell}")
    fixture = Fixture(capture.file(capture.run(tmp_path / "out", emulated=True, wanted=wanted), tmp_path / "filed"))
    assert fixture.record["failed"] == {} and len(fixture.index["rungs"]) == len(wanted[f"rungs {cell}"])
    assert uncovered(fixture.index["ptx"].values()) == []
    rows = [row for rung, stage in stages(fixture) if stage["launches"] for row in stage_compare.compare(rung, stage, fixture)]
    assert [row for row in rows if row.complaint or row.equal < row.elements] == []
