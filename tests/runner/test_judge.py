"""The judge tells a wrong answer from a case that cannot judge."""

import dataclasses
from pathlib import Path

import pytest
import torch

from kernels.kda import budget, oracle
from kernels.kda.cases import Case
from ladder import judge as judging
from ladder.judge import VOID, Judge, Parcel, Plea

CASE = Case("t", B=1, T=70, H=1, HV=1, K=32, V=32, gpu=False)


@pytest.fixture
def judge():
    judge = Judge(torch.device("cpu"))
    yield judge
    judge.close()


def plea(judge, o, state):
    return Plea(CASE, "slow", "pre", 3, (Parcel.pack(judge.folder.name, "o", o), Parcel.pack(judge.folder.name, "s", state)))


def exact(judge):
    reference = judge.reference(CASE, "slow", "pre", 3)
    return reference.o.bfloat16(), reference.state.float()


def test_right_and_wrong(judge):
    o, state = exact(judge)
    assert judge.answer(plea(judge, o, state)) is None
    assert "o: row error" in judge.answer(plea(judge, o * 1.1, state))


def test_a_void_case_blames_the_reference_and_nan_still_fails(judge):
    o, state = exact(judge)
    key = (CASE, "slow", "pre", 3)
    judge._kept[key] = dataclasses.replace(judge._kept[key], void="the low-precision reference errs")
    assert judge.answer(plea(judge, o, state)) == f"{VOID}the low-precision reference errs"
    assert judge.answer(plea(judge, o * 1.1, state)).startswith(VOID)
    o[0, 5] = float("nan")
    assert "NaN" in judge.answer(plea(judge, o, state))


def starve(monkeypatch, module, name, times):
    """module.name finds no memory, so many times; the pauses are short."""
    real, left = getattr(module, name), iter(range(times))

    def once(*args, **kw):
        if next(left, None) is not None:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4.00 GiB")
        return real(*args, **kw)

    monkeypatch.setattr(module, name, once)
    monkeypatch.setattr(judging, "FIRST_PAUSE_S", 0.001)


@pytest.mark.parametrize(("module", "name"), [(oracle, "recurrent"), (budget, "judge")])
def test_the_judge_waits_for_memory(judge, monkeypatch, module, name):
    o, state = exact(judge)
    starve(monkeypatch, module, name, 3)
    judge._kept.clear()
    assert judge.answer(plea(judge, o, state)) is None
    assert "o: row error" in judge.answer(plea(judge, o * 1.1, state))
    assert not list(Path(judge.folder.name).iterdir())


def test_the_judge_gives_up_in_the_end(judge, monkeypatch):
    sent = plea(judge, *exact(judge))
    starve(monkeypatch, budget, "judge", 10**9)
    monkeypatch.setattr(judging, "PATIENCE_S", 0.1)
    with pytest.raises(torch.OutOfMemoryError, match="4.00 GiB"):
        judge.answer(sent)
    assert not list(Path(judge.folder.name).iterdir())


def test_other_errors_are_not_waited_for(judge, monkeypatch):
    monkeypatch.setattr(judging.time, "sleep", lambda s: pytest.fail("waits"))
    with pytest.raises(ValueError, match="regime"):
        judge.answer(Plea(CASE, "fast", "pre", 3, (None, None)))


def test_old_references_go_before_a_new_one_is_computed(judge, monkeypatch):
    first = judge.reference(CASE, "slow", "pre", 1)
    monkeypatch.setitem(judging.KEPT_BYTES, "cpu", 5 * (first.o.nbytes + first.state.nbytes) // 2)
    kept, real = [], oracle.recurrent
    monkeypatch.setattr(oracle, "recurrent", lambda **call: (kept.append(len(judge._kept)), real(**call))[1])
    for seed in (2, 3, 4, 2):
        judge.reference(CASE, "slow", "pre", seed)
    assert kept == [1, 1, 1, 1] and judge.computed == 5
    monkeypatch.setitem(judging.KEPT_BYTES, "cpu", 1)
    judge.reference(CASE, "slow", "pre", 5)
    assert kept[-1] == 0 and judge.reference(CASE, "slow", "pre", 5) and len(kept) == 5  # one is kept, whatever its size


def test_a_gpu_is_shared():
    assert judging.KEPT_BYTES["cuda"] <= 4 << 30
