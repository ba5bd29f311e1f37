"""The oracle: two independent forms agree, both agree with fla's naive reference, and it passes its own checker."""

import pytest
import torch

from kernels.kda import budget, inputs, oracle
from kernels.kda.cases import Case

CASE = Case("t", B=2, T=150, H=1, HV=2, K=32, V=48, initial_state=True)
CELLS = [(regime, form) for regime in inputs.REGIMES for form in inputs.FORMS]


def relative(x: torch.Tensor, y: torch.Tensor) -> float:
    return ((x - y).abs().max() / y.abs().max()).item()


@pytest.mark.parametrize(("regime", "form"), CELLS)
def test_chunked_form_agrees_with_the_recurrence(regime, form):
    call = inputs.make(CASE, regime, form, seed=3).call()
    for ours, exact in zip(oracle.chunked(**call), oracle.recurrent(**call)):
        assert relative(ours, exact) < 1e-10


@pytest.mark.parametrize("decay", [0.0, -1.0, -5.0, -27.6, -200.0])
def test_constant_gates(decay):
    call = inputs.make(CASE, "slow", "pre", seed=4).call()
    call["g"] = torch.full_like(call["g"], decay)
    (o, state), (exact_o, exact_state) = oracle.chunked(**call), oracle.recurrent(**call)
    assert torch.isfinite(o).all() and torch.isfinite(state).all()
    assert relative(o, exact_o) < 1e-10 and relative(state, exact_state) < 1e-10


def test_agrees_with_flas_naive_reference():
    naive = pytest.importorskip("fla.ops.kda.naive")
    call = inputs.make(CASE, "slow", "pre", seed=5).call()
    theirs_o, theirs_state = naive.naive_recurrent_kda(
        call["q"].float(), call["k"].float(), call["v"].float(), call["g"], call["beta"],
        initial_state=call["initial_state"], output_final_state=True)  # fmt: skip
    for form in (oracle.recurrent, oracle.chunked):
        o, state = form(**call)
        assert relative(theirs_o.double(), o) < 1e-5 and relative(theirs_state.double(), state) < 1e-5


def test_forms_pose_the_same_problem():
    """prod, prepared in fp64, differs from pre only by pre's rounding of normalised q and k to bf16."""
    prod, pre = (inputs.make(CASE, "mixed", form, seed=6).call() for form in inputs.FORMS)
    a, b = oracle.prepare(**prod), oracle.prepare(**pre)
    assert relative(b.g, a.g) < 1e-5 and relative(b.beta, a.beta) < 1e-6
    assert relative(b.q, a.q) < 2**-7 and torch.equal(a.v, b.v)


def test_passes_its_own_checker():
    call = inputs.make(CASE, "strong", "prod", seed=7).call()
    reference = budget.reference(oracle.recurrent(**call), **call)
    verdicts = budget.judge(*oracle.chunked(**call), reference)
    assert [v.passed for v in verdicts] == [True, True]
    assert all(v.error < 1e-10 for v in verdicts)
