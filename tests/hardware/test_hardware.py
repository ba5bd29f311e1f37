"""The emulator against what an H200 did: every one-instruction program, and every stage of every sm_90a rung.

The hardware's side is a capture filed under fixtures/ (capture.py). A program is compared bit for bit or within the manual's
error; a stage bit for bit where the order of its instructions fixes every rounding, else within derived balls (stage_bounds.py).
"""

import functools
import json
import lzma

import capture
import fixture_files
import pytest
import stage_compare
from fixture_files import FOLDER, Fixture
from programs import everything, uncovered

NONE = "no capture from a GPU is filed under tests/hardware/fixtures; capture.py says how one is made"
FAST = ("small/strong/prod", "small_k128/mixed/pre")
pytestmark = pytest.mark.skipif(not fixture_files.present(), reason=NONE)


@functools.cache
def fixture() -> Fixture:
    return Fixture(FOLDER)


def stages():
    """A parameter for each recorded stage, those that repeat another's launches on the same bytes left out; one without a
    stage where nothing is filed."""
    if not fixture_files.present():
        return [pytest.param(None, None, id="none filed")]
    found, seen = [], set()
    for rung in json.loads(lzma.decompress((FOLDER / "index.json.xz").read_bytes()))["rungs"]:
        cell = f"{rung['case']}/{rung['regime']}/{rung['form']}"
        for stage in rung.get("stages", ()):
            key = json.dumps(stage, sort_keys=True)
            if stage["launches"] and key not in seen:
                seen.add(key)
                marks = () if cell in FAST else pytest.mark.slow
                found.append(pytest.param(rung, stage, id=f"{rung['rung']} {cell} {stage['name']}", marks=marks))
    return found


def test_everything_ran_on_the_hardware():
    record = fixture().record
    assert record["emulated"] is False and record["failed"] == {}, record["failed"]


def test_every_instruction_that_is_not_plain_has_a_program():
    """Of the PTX that ran: what a rung uses and no program has is not proved against anything."""
    assert uncovered(fixture().index["ptx"].values()) == []


@pytest.mark.parametrize("name", everything())
def test_program(name):
    answer = fixture().index["programs"].get(name)
    if answer is None and f"programs {everything()[name].group}: {name}" not in fixture().record["failed"]:
        pytest.skip("not in the capture: the program is younger")
    assert answer is not None, fixture().record["failed"][f"programs {everything()[name].group}: {name}"]
    complaint = capture.compare_program(name, fixture())
    assert complaint is None, complaint


@pytest.mark.parametrize("rung, stage", stages())
def test_stage(rung, stage):
    rows = stage_compare.compare(rung, stage, fixture())
    assert rows and not any(row.complaint for row in rows), "\n".join(
        f"{row.tensor}: {row.complaint}" for row in rows if row.complaint
    )
