"""Rung 015 orders PREP's memory accesses anew: in the emulator, the bits of its parent, in rows with helpers and in even shares."""

import pytest
import torch

from tests.helped import drawn, run, slow
from tests.helped import rung as helped_rung

PARENT, NAME = "013-even-cuts", "015-loads-first"


@pytest.mark.parametrize("arch, T, K, regime, form, shares", [
    ("sm_90a", 330, 64, "mixed", "prod", False),
    ("sm_90a", 200, 128, "init", "prod", False),  # dyadic diagonal blocks
    ("sm_90a", 1100, 64, "strong", "pre", True),
    slow("sm_90a", 330, 128, "slow", "pre", False),
    slow("sm_90a", 1100, 128, "strong", "prod", True),
    slow("sm_100a", 330, 64, "init", "pre", False),
    slow("sm_100a", 200, 128, "strong", "prod", False),
])  # fmt: skip
def test_the_bits_are_the_parents(monkeypatch, arch, T, K, regime, form, shares):
    call = drawn(T, 1, K, regime, form)
    outputs = []
    for name in (PARENT, NAME):
        rung = helped_rung(name, monkeypatch, 3, (0.0, 128, 0, 1, 1))
        if shares:
            monkeypatch.setattr(rung.module, "EVEN", (0, 0, 4))
        outputs.append(run(rung, call, arch))
        (plan,) = rung.module.CALLS._plans.values()
        assert plan.scalars[0] == (3 if shares else 0)
    assert all(map(torch.equal, *outputs))
