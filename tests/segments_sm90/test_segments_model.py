"""Segments in plain torch: inside the error budget in every regime, and what is not a bound falls out of it."""

import pytest
import segments_model as model
import torch

from kernels.kda import budget, inputs, oracle
from kernels.kda.cases import Case


def judged(call: dict, length: int, fade=model.per_token, skip: int = 0) -> list[budget.Verdict]:
    ref = budget.reference(oracle.chunked(**call), **call)
    assert ref.void is None
    return budget.judge(*model.segmented(call, length, fade, skip), ref)


def drawn(T: int, regime: str, form: str) -> dict:
    return inputs.make(Case("drawn", 1, T, 1, 2, 64, 64, initial_state=True), regime, form, seed=T).call()


def test_one_segment_is_the_budget_s_own_reference():
    call = drawn(200, "mixed", "prod")
    for ours, theirs in zip(model.segmented(call, 9), budget.low_precision(**call)):
        assert budget.row_errors(ours, theirs.double()).max() < 1e-2  # sums in another order, then roundings


@pytest.mark.parametrize("form", inputs.FORMS)
@pytest.mark.parametrize("regime", inputs.REGIMES)
def test_within_the_budget(regime, form):
    verdicts = judged(drawn(390, regime, form), 2)
    assert all(v.passed for v in verdicts), verdicts


def test_strong_gates_close_the_bound_within_a_dozen_chunks_and_slow_ones_never():
    for regime, closes in (("strong", True), ("slow", False), ("mixed", False)):
        fades = [c.fade[0, 0].item() for c in model.chunks(drawn(14 * 64, regime, "prod"))]
        walked = [c - model.first_chunk(fades, c) for c in range(14)]
        assert all(6 <= n <= 12 for n in walked[12:]) if closes else walked == list(range(14))


def test_a_segment_from_zero_without_its_walk_is_found_out():
    assert not all(v.passed for v in judged(drawn(390, "strong", "prod"), 2, skip=6))


def test_summed_gates_are_no_bound():
    """Every channel's gates sum to -230 (log2) in a chunk, but the keys carry the state past them."""
    call = model.hopping_call(320, 64, 64)
    assert all(v.passed for v in judged(call, 1))
    assert not all(v.passed for v in judged(call, 1, model.per_channel))
    assert max(c.fade.max() for c in model.chunks(call, model.per_channel)) < -200


def test_the_bound_holds_for_unnormalised_keys_and_large_betas():
    """The transition's norm is below the fade's, with keys and betas that grow the state."""
    gen = torch.Generator().manual_seed(2)
    call = drawn(64, "mixed", "pre")
    call["k"] = (call["k"].float() * (1 + 2 * torch.rand(1, 64, 1, 1, generator=gen))).bfloat16()
    call["beta"] = call["beta"] * 3
    chunk = model.chunks(call)[0]
    x = oracle.prepare(**call)
    for hv in range(2):
        M = torch.eye(64, dtype=torch.float64)
        for t in range(64):
            k = x.k[0, t, hv]
            M = (torch.eye(64) - x.beta[0, t, hv] * torch.outer(k, k)) @ (x.g[0, t, hv].exp()[:, None] * M)
        assert torch.linalg.matrix_norm(M, 2).log2() < chunk.fade[0, hv]
        assert chunk.fade[0, hv] > 0
