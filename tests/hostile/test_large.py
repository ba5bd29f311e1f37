"""Sizes whose products pass 2^31. Refused by the rung, or right: `pytest -m gpu tests/hostile/test_large.py` (60 GiB)."""

from __future__ import annotations

import pytest
import torch

from kernels.kda import budget, inputs, oracle
from kernels.kda.cases import Case
from ladder import autotune, loader, manifest
from ladder.cells import problem_of
from ladder.checks.honesty import FLA_KERNELS
from ladder.judge import starved

LADDER = manifest.load(manifest.ROOT)
NUMBERS = LADDER.numbers()
TAIL = 256  # tokens compared: with strong gates nothing older than about 30 tokens is left by then
BEFORE = 64  # of them that still feel what came earlier
LARGE = {
    "tokens": Case("tokens", 1, 1 << 18, 1, 66, 128, 128),  # HV * T * K = 2^31 + 2^26: the last two heads lie beyond
    "batches": Case("batches", 4100, 64, 1, 64, 128, 128),  # B * T * HV * K beyond 2^31, and the states' 2^32
}


@pytest.mark.parametrize("case", LARGE)
def test_they_are_large(case):
    c = LARGE[case]
    assert c.B * c.T * c.HV * c.K > 1 << 31


@pytest.fixture(scope="module", params=LARGE)
def large(request):
    """The inputs, drawn once for all rungs, and what `answers` expects of them."""
    autotune.use_recorded(torch.cuda.get_device_name())
    drawn = inputs.make(LARGE[request.param], "strong", "prod", 5, "cuda")
    yield drawn, list(expected(drawn))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("number", NUMBERS)
def test_beyond_31_bits(number, large):
    """The first and the last batch and head, last tokens, against the oracle on that part alone."""
    drawn, parts = large
    rung = loader.load(LADDER.folder(LADDER.rung(number)))
    if refusal := rung.unsupported(problem_of(drawn)):
        pytest.skip(f"refused: {refusal}")
    torch.cuda.empty_cache()
    wrong, complaint = answers(rung.chunk_kda, drawn, parts)
    if wrong and any(kernel.startswith(sum(FLA_KERNELS.values(), ())) for kernel in rung.kernels):
        from fla.ops.kda import chunk_kda

        torch.cuda.empty_cache()
        if answers(chunk_kda, drawn, parts) == (wrong, complaint):
            pytest.skip(f"inherited from fla, whose own chunk_kda does the same: {complaint}")
    assert not wrong, complaint


def answers(call, drawn: inputs.Inputs, parts: list) -> tuple[str, str]:
    """What kind of wrong the answer is ("" for right), and in words."""
    try:
        with torch.no_grad():
            o, state = call(**drawn.call())
        torch.cuda.synchronize()
    except RuntimeError as error:
        if starved(error):
            raise
        torch.cuda.synchronize()  # raises in turn where the device is lost
        return "raises", f"{type(error).__name__}: {error}"
    for (batch, head), exact, allowed in parts:
        rows = exact[0].shape[1]
        got = o[batch, -rows:, head][None, :, None], state[batch, head][None, None]
        for name, x, y, most in zip(("o", "state"), got, exact, allowed):
            if not (error := budget.row_errors(x, y).max().item()) <= most:
                return "wrong", f"{name} of batch {batch}, head {head}: row error {error:.3g}, accepted: {most:.3g}"
    return "", ""


def expected(drawn: inputs.Inputs):
    """(batch, head), the exact o of its last tokens and state, and the errors that they may have."""
    c = drawn.case
    tail = slice(max(0, c.T - TAIL), c.T)
    skip = 0 if c.T <= TAIL else BEFORE
    for batch in sorted({0, c.B - 1}):
        for head in sorted({0, c.HV - 1}):
            call = _part(drawn, batch, head, tail)
            (o, state), (low_o, low_state) = oracle.recurrent(**call), budget.low_precision(**call)
            pairs = ((low_o[:, skip:], o[:, skip:]), (low_state, state))
            allowed = [2 * (budget.row_errors(x, y).max().item() + torch.finfo(x.dtype).eps) for x, y in pairs]
            yield (batch, head), [y for _, y in pairs], allowed


def _part(drawn: inputs.Inputs, batch: int, head: int, tokens: slice) -> dict:
    t, K = drawn.tensors, drawn.case.K
    one = {"q": t["q"][batch, tokens, 0], "k": t["k"][batch, tokens, 0], "v": t["v"][batch, tokens, head],
           "g": t["g"][batch, tokens, head], "beta": t["beta"][batch, tokens, head]}  # fmt: skip
    one = {name: x[None, :, None] for name, x in one.items()}
    return {**one, **drawn.flags, "A_log": t["A_log"][head : head + 1], "dt_bias": t["dt_bias"][head * K : (head + 1) * K]}
