"""Inputs: the regimes are what they say, a seed replays, and the forms carry the flags of the contract."""

import math

import pytest
import torch

from kernels.kda import inputs, oracle
from kernels.kda.cases import Case, floor_bytes

CASE = Case("t", B=1, T=256, H=4, HV=4, K=64, V=64)
# Natural-log decay a token. slow: lower_bound * exp(-8.8), since exp(A_log) stretches the raw -8 by 1.1.
MEDIAN = {"strong": -2.5, "slow": -0.00075, "init": -0.07}


@pytest.mark.parametrize("regime", MEDIAN)
def test_median_decay(regime):
    g = oracle.prepare(**inputs.make(CASE, regime, "prod", seed=1).call()).g
    assert math.isclose(g.median().item(), MEDIAN[regime], rel_tol=0.5)
    assert (g <= 0).all() and (regime == "init" or (g >= inputs.LOWER_BOUND).all())


def test_mixed_draws_each_head_and_channel_from_one_or_the_other():
    g = oracle.prepare(**inputs.make(CASE, "mixed", "prod", seed=2).call()).g
    slow = g.median(dim=1).values > -0.1  # [B,HV,K]
    assert 0.3 < slow.float().mean() < 0.7
    assert all(0 < head.sum() < CASE.K for head in slow[0])


def test_a_seed_replays_and_fresh_seeds_differ():
    a, b = (inputs.make(CASE, "mixed", "pre", seed=5) for _ in range(2))
    assert all(torch.equal(a.tensors[n], b.tensors[n]) for n in a.tensors)
    c, d = (inputs.make(CASE, "mixed", "pre") for _ in range(2))
    assert c.seed != d.seed and not torch.equal(c.tensors["q"], d.tensors["q"])


def test_forms():
    prod, pre = (inputs.make(CASE, "strong", form, seed=6) for form in inputs.FORMS)
    assert prod.tensors["g"].dtype == torch.bfloat16 and "A_log" in prod.tensors and prod.flags["use_gate_in_kernel"]
    assert pre.tensors["g"].dtype == torch.float32 and "A_log" not in pre.tensors and "lower_bound" not in pre.flags
    assert pre.flags["safe_gate"] and not inputs.make(CASE, "init", "pre", seed=6).flags["safe_gate"]
    norms = pre.tensors["q"].float().norm(dim=-1)
    assert torch.allclose(norms, torch.ones_like(norms), atol=1e-2)
    assert ((pre.tensors["beta"] > 0) & (pre.tensors["beta"] < 1)).all()


@pytest.mark.parametrize(("key", "args"), [("regime", ("weak", "prod")), ("form", ("slow", "post"))])
def test_unknown_names_are_refused(key, args):
    with pytest.raises(ValueError, match=f"{key}: given .* accepted: "):
        inputs.make(CASE, *args)


def test_floor_bytes_of_h96():
    """The field notes' floor for h96 (q, k, v, g, o once each, 0.237 ms at 4.26 TB/s) plus betas and the final state."""
    h96 = Case("h96", B=1, T=8192, H=96, HV=96, K=128, V=128)
    extra = 8192 * 96 * 2 + 96 * 128 * 128 * 4 + 96 * 129 * 4
    assert floor_bytes(h96, "prod") - extra == 8192 * 96 * 1280
    assert math.isclose((floor_bytes(h96, "prod") - extra) / 4.26e9, 0.237, rel_tol=0.01)
