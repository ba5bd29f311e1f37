"""SentryWard's proofs of the Blackwell kernels, and that faults planted in them are found."""

from pathlib import Path

import faults
import pytest

from ladder import verify, verify_reference
from ladder.manifest import ROOT
from ladder.verify_input import Shape, record
from ladder.verify_ptx import default_collector, typed_stores, unfenced_stores, unwaited_loads

PROVED = ("002-cute-fused", "003-cute-pipeline", "004-prezeroed-aqk")
PIPELINE = "003-cute-pipeline"


def launch(rung, T):
    return record(verify.state_unit(ROOT / "ideas" / rung, verify.ARCH), Shape(T))


@pytest.fixture(scope="module")
def pipeline():
    return launch(PIPELINE, 64)


def assert_passed(rows):
    rows = list(rows)
    assert rows and all(outcome == verify.PASSED for _, outcome, *_ in rows), rows
    return rows


# ---- proofs ----


def test_one_chunk(pipeline):
    rows = assert_passed(verify.races(pipeline))
    assert [name for name, *_ in rows] == ["synchronization, T=64", "memory, T=64", "no warnings, T=64"]


@pytest.mark.slow
@pytest.mark.parametrize("T", verify.TOKENS)
@pytest.mark.parametrize("rung", PROVED)
def test_races(rung, T):
    assert_passed(verify.races(launch(rung, T)))


@pytest.mark.slow
@pytest.mark.parametrize("rung", PROVED)
def test_equality(rung):
    (row,) = assert_passed([verify.equal(launch(rung, 64))])
    assert "collector::a::discard dropped" in row[2] and "st.global.f32" in row[2]


@pytest.mark.slow
def test_another_reference_is_not_equal(pipeline):
    source = Path(verify_reference.__file__).read_text()
    other = source.replace("scale * torch.matmul(qg[rows].float(), h) +", "scale * torch.matmul(qg[rows].float(), h) -")
    assert other != source
    _, outcome, reason, _ = verify.equal(pipeline, other)
    assert outcome == verify.FAILED and "128 of 192 output families" in reason  # the final state still is


@pytest.mark.parametrize("rung", PROVED)
def test_what_the_verifier_does_not_model(rung):
    ptx = launch(rung, 64).ptx
    assert unfenced_stores(ptx) == [] and unwaited_loads(ptx) == []


def test_rows_of_a_rung_without_such_a_kernel():
    (row,) = verify.verify(ROOT / "ideas" / "001-baseline")
    assert row["outcome"] == verify.NOT_RUN and "no state_sm100.py" in row["reason"]
    for rung in ("005-fused-prep", "007-segments"):
        (row,) = verify.verify(ROOT / "ideas" / rung)
        assert row["outcome"] == verify.NOT_RUN and "reads something else" in row["reason"]
    (row,) = verify.verify(ROOT / "ideas" / PIPELINE, arch="sm_90a")
    assert row["outcome"] == verify.NOT_RUN and "wgmma" in row["reason"]


# ---- planted faults ----


@pytest.mark.parametrize("plant", faults.ALL, ids=lambda f: f.__name__)
def test_planted_fault_is_found(pipeline, plant):
    ptx, _ = default_collector(pipeline.ptx)
    faulty = plant(ptx)
    assert faulty != ptx
    result, _ = verify.analyse(faulty, pipeline)
    checks = result["checks"]
    assert result["result"] in ("not_wellsynced", "potential_race"), (result["result"], verify.findings(result))
    assert "failed" in (checks["synchronization"], checks["memory"])


# Guards of what SentryWard does not model, uses of shared memory after its CTA: the TMA warp's wait for the last
# commit's arrive, and the epilogue's for the last store's read.
GUARDS = {"mbarrier.try_wait 1", "cp.async.bulk.wait_group 1"}


@pytest.mark.slow
@pytest.mark.parametrize("number", range(25))
def test_no_synchronisation_is_redundant(number):
    """Three chunks reuse every stage; without any one of its operations the kernel is no longer proved."""
    three = launch(PIPELINE, 192)
    ptx, _ = default_collector(three.ptx)
    operations = faults.synchronisation(ptx)
    assert len(operations) == 25
    name, first, last = operations[number]
    lines = ptx.split("\n")
    result, _ = verify.analyse("\n".join(lines[:first] + lines[last + 1 :]), three)
    expected = {"race_free"} if name in GUARDS else {"not_wellsynced", "potential_race", "invalid_lifecycle"}
    assert result["result"] in expected, (name, lines[first : last + 1])


@pytest.mark.parametrize("number", range(5))
def test_each_missing_fence_is_found(pipeline, number):
    lines = pipeline.ptx.split("\n")
    fences = [i for i, line in enumerate(lines) if "fence.proxy.async" in line]
    assert len(fences) == 5  # h0, v' twice, h, o
    found = unfenced_stores("\n".join(lines[: fences[number]] + lines[fences[number] + 1 :]))
    assert len(found) == 1 and "with no proxy fence" in found[0]


@pytest.mark.parametrize("number", range(3))
def test_each_missing_load_wait_is_found(pipeline, number):
    lines = pipeline.ptx.split("\n")
    waits = [i for i, line in enumerate(lines) if "tcgen05.wait::ld" in line]
    assert len(waits) == 3  # WH, DH, OH with OI
    found = unwaited_loads("\n".join(lines[: waits[number]] + lines[waits[number] + 1 :]))
    assert len(found) == 1 and "with no wait::ld" in found[0]


# ---- the input ----


def test_edits_are_listed(pipeline):
    ptx, (edit,) = default_collector(pipeline.ptx)
    text = pipeline.ptx.split("\n")
    assert "discard" not in ptx and len(edit.lines) == 24 and all("tcgen05.mma" in text[n - 1] for n in edit.lines)
    ptx, (edit,) = typed_stores(pipeline.ptx)
    assert len(edit.lines) == 64
    assert str(edit).startswith("st.global.b32 written st.global.f32, the same bits (64 lines: ")


def test_input_is_the_launch():
    given = record(verify.state_unit(ROOT / "ideas" / PIPELINE, verify.ARCH), Shape(192, B=2, HV=3)).input
    assert given["launch"]["grid_dim"] == [6, 1, 1] and given["launch"]["block_dim"] == [320, 1, 1]
    assert given["launch"]["dynamic_shared_bytes"] == 198656
    maps = {m["object"]: m for m in given["tma_descriptors"]}
    assert set(maps) == {"qg", "w", "kg", "aqk", "u", "g2", "o"}
    assert maps["qg"]["global_shape"] == [128, 192, 3, 2] and maps["qg"]["box_shape"] == [64, 64, 1, 1]
    assert maps["g2"]["global_strides_bytes"] == [3 * 512, 512, 192 * 3 * 512] and maps["g2"]["swizzle"] == "none"
    assert {d["object"] for d in given["declarations"]} == {"h0", "ht"}
