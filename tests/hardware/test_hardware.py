"""The emulator against what an H200 did: every one-instruction program, and every stage of every sm_90a rung.

The hardware's side is a capture filed under fixtures/ (capture.py). A program is compared bit for bit or within the manual's
error; a stage bit for bit where the order of its instructions fixes every rounding, else within derived balls (stage_bounds.py).
"""

import functools
import json

import capture
import fixture_files
import pytest
import stage_compare
from fixture_files import FOLDER, Fixture
from programs import everything, uncovered
from programs.program import emulate

from emulator import EmulatorError
from ladder.manifest import ROOT

NONE = "no capture from a GPU is filed under tests/hardware/fixtures; capture.py says how one is made"
TRAP = "CUDA_ERROR_ILLEGAL_INSTRUCTION"
FAST = (
    *(f"{rung} small/strong/prod" for rung in ("001-baseline", "003-cute-pipeline", "004-prezeroed-aqk", "007-segments")),
    "010-received-runs small_k128/mixed/pre",
)
pytestmark = pytest.mark.skipif(not fixture_files.present(), reason=NONE)


@functools.cache
def fixture() -> Fixture:
    return Fixture(FOLDER)


def key(name: str) -> str:
    """A program's name among the failures."""
    return f"programs {everything()[name].group}: {name}"


def stages():
    """A parameter for each recorded stage, those that repeat another's launches on the same bytes left out; one without a
    stage where nothing is filed."""
    if not fixture_files.present():
        return [pytest.param(None, None, id="none filed")]
    found, seen = [], set()
    for rung in fixture().index["rungs"]:
        cell = f"{rung['case']}/{rung['regime']}/{rung['form']}"
        for stage in rung.get("stages", ()):
            key = json.dumps(stage, sort_keys=True)
            if stage["launches"] and key not in seen:
                seen.add(key)
                name = f"{rung['rung']} {cell} {stage['name']}"
                marks = () if any(part in name for part in FAST) else pytest.mark.slow
                found.append(pytest.param(rung, stage, id=name, marks=marks))
    return found


def test_everything_ran_on_the_hardware():
    record = fixture().record
    assert record["emulated"] is False
    assert set(record["failed"]) == {key(n) for n, p in everything().items() if p.traps}, record["failed"]


def test_every_instruction_that_is_not_plain_has_a_program():
    """Of the PTX that ran: what a rung uses and no program has is not proved against anything."""
    assert uncovered(fixture().index["ptx"].values()) == []


@pytest.mark.parametrize("name", everything())
def test_program(name):
    answer, failed = fixture().index["programs"].get(name), fixture().record["failed"].get(key(name))
    if answer is None and failed is None:
        pytest.skip("not in the capture: the program is younger")
    if everything()[name].traps:
        assert failed and TRAP in failed
        with pytest.raises(EmulatorError):
            emulate(everything()[name])
        return
    assert failed is None, failed
    complaint = capture.compare_program(name, fixture())
    assert complaint is None, complaint


def test_tensor_maps():
    """Every bit of the driver's maps: but for bit 1 of word 1, and the L2 promotion, which the programs do not ask for."""
    for name, answer in fixture().index["programs"].items():
        for n, kept in answer["maps"].items():
            ours = int.from_bytes(capture.kept_program(name, fixture())[0].maps[n].encoded(0)[:64], "little")
            assert ours ^ int.from_bytes(bytes.fromhex(kept), "little") == (1 << 1 | 2 << 17) << 64, name


def test_hardware_md_is_about_this_capture():
    record = fixture().record
    told = (ROOT / "emulator" / "HARDWARE.md").read_text()
    assert f"{record['device']['name']}, driver {record['device']['driver_version']}, {record['date'][:10]}" in told


@pytest.mark.parametrize("rung, stage", stages())
def test_stage(rung, stage):
    rows = stage_compare.compare(rung, stage, fixture())
    assert rows and not any(row.complaint for row in rows), "\n".join(
        f"{row.tensor}: {row.complaint}" for row in rows if row.complaint
    )
