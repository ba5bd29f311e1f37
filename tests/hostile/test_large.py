"""Sizes whose products pass 2^31. Refused by the rung, or right: `pytest -m gpu tests/hostile/test_large.py` (60 GiB)."""

from __future__ import annotations

import pytest
import torch

from kernels.kda import budget, inputs, oracle
from kernels.kda.cases import Case
from ladder import loader, manifest

LADDER = manifest.load(manifest.ROOT)
NUMBERS = LADDER.numbers()
TAIL = 512  # tokens compared: with strong gates nothing older than about 30 tokens is left by then
LARGE = {
    "tokens": Case("tokens", 1, 1 << 18, 1, 66, 128, 128),  # HV * T * K = 2^31 + 2^26: the last two heads lie beyond
    "batches": Case("batches", 4100, 64, 1, 64, 128, 128),  # B * T * HV * K beyond 2^31, and the states' 2^32
}


@pytest.mark.parametrize("case", LARGE)
def test_they_are_large(case):
    c = LARGE[case]
    assert c.B * c.T * c.HV * c.K > 1 << 31


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("case", LARGE)
@pytest.mark.parametrize("number", NUMBERS)
def test_beyond_31_bits(number, case):
    """The first and the last batch and head, last tokens, against the oracle on that part alone."""
    from kernels.kda.contract import Unsupported

    drawn = inputs.make(LARGE[case], "strong", "prod", 5, "cuda")
    rung = loader.load(LADDER.folder(LADDER.rung(number)))
    try:
        with torch.no_grad():
            o, state = rung.chunk_kda(**drawn.call())
    except Unsupported as refusal:
        pytest.skip(f"refused: {refusal}")
    c = LARGE[case]
    tail = slice(max(0, c.T - TAIL), c.T)
    for batch in {0, c.B - 1}:
        for head in {0, c.HV - 1}:
            call = _part(drawn, batch, head, tail)
            exact = oracle.recurrent(**call)
            skip = 0 if c.T <= TAIL else 64  # the part's first rows still feel what came before it
            got = o[batch, tail, head][None, skip:, None], state[batch, head][None, None]
            low = budget.low_precision(**call)
            for name, x, y, z in zip(("o", "state"), got, low, exact):
                y, z = (y[:, skip:], z[:, skip:]) if name == "o" else (y, z)
                allowed = 2 * (budget.row_errors(y, z).max() + torch.finfo(y.dtype).eps)
                assert budget.row_errors(x, z).max() <= allowed, f"{name} of batch {batch}, head {head}"


def _part(drawn: inputs.Inputs, batch: int, head: int, tokens: slice) -> dict:
    t, K = drawn.tensors, drawn.case.K
    one = {"q": t["q"][batch, tokens, 0], "k": t["k"][batch, tokens, 0], "v": t["v"][batch, tokens, head],
           "g": t["g"][batch, tokens, head], "beta": t["beta"][batch, tokens, head]}  # fmt: skip
    one = {name: x[None, :, None] for name, x in one.items()}
    return {**one, **drawn.flags, "A_log": t["A_log"][head : head + 1], "dt_bias": t["dt_bias"][head * K : (head + 1) * K]}
