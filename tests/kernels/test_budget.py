"""The budget fails what it must fail: a wrong row, the wrong tensor, NaN, a biased kernel; and it voids bad references."""

import dataclasses

import pytest
import torch

from kernels.kda import budget, inputs, oracle
from kernels.kda.cases import Case

CASE = Case("t", B=1, T=130, H=2, HV=2, K=64, V=64, initial_state=True)


@pytest.fixture(scope="module", params=[(r, f) for r in inputs.REGIMES for f in inputs.FORMS], ids="-".join)
def judged(request):
    call = inputs.make(CASE, *request.param, seed=11).call()
    return budget.reference(oracle.chunked(**call), **call), budget.low_precision(**call)


def outcome(ref, o, state):
    return {v.tensor: v for v in budget.judge(o, state, ref)}


def test_low_precision_version_passes_with_room(judged):
    ref, (o, state) = judged
    assert ref.void is None
    for verdict in outcome(ref, o, state).values():
        assert verdict.passed and verdict.error < verdict.budget / 2


def test_one_wrong_row_fails_and_is_named(judged):
    ref, (o, state) = judged
    o = o.clone()
    o[0, 77, 1] *= 1.1
    verdict = outcome(ref, o, state)["o"]
    assert not verdict.passed and verdict.where == (0, 77, 1) and "token 77, head 1" in verdict.reason


def test_o_right_and_state_wrong_fails(judged):
    ref, (o, state) = judged
    verdicts = outcome(ref, o, state.roll(1, dims=2))
    assert verdicts["o"].passed and not verdicts["final_state"].passed


def test_transposed_state_fails(judged):
    ref, (o, state) = judged
    assert not outcome(ref, o, state.transpose(-1, -2))["final_state"].passed


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_and_inf_fail_even_where_the_answer_is_zero(judged, value):
    ref, (o, state) = judged
    zero = dataclasses.replace(ref, o=torch.zeros_like(ref.o))
    o = torch.zeros_like(o)
    o[0, 5, 0, 3] = value
    verdict = outcome(zero, o, state)["o"]
    assert not verdict.passed and verdict.where == (0, 5, 0) and "NaN or Inf" in verdict.reason


def test_uniform_bias_fails(judged):
    ref, (_, state) = judged
    assert not outcome(ref, (ref.o * 1.05).to(torch.bfloat16), state)["o"].passed


def test_wrong_shape_fails(judged):
    ref, (o, state) = judged
    assert "shape" in outcome(ref, o[:, :-1], state)["o"].reason


def test_poor_reference_voids_the_case():
    call = inputs.make(CASE, "slow", "pre", seed=12).call()
    exact = oracle.chunked(**call)
    ref = budget.reference((exact[0] + 0.1 * exact[0].roll(1, dims=1), exact[1]), **call)
    assert ref.void and "low-precision reference" in ref.void
    verdicts = budget.judge(*exact, ref)
    assert not any(v.passed for v in verdicts) and all("void" in v.reason for v in verdicts)
