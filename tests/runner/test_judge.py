"""The judge tells a wrong answer from a case that cannot judge."""

import dataclasses

import pytest
import torch

from kernels.kda.cases import Case
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
