"""Rung 009's kernel, executed from its PTX on the CPU: helpers change no bit, whatever their number and lead."""

import pytest
import torch

from emulator.races import Races
from kernels.kda import budget, oracle
from ladder import loader
from tests.helped import IDEAS, drawn, rung, run

NAME = "009-helpers"
EVERY_SECOND = (0.0, 2, 0)  # idle SMs for one that walks, period, lead


@pytest.mark.parametrize("T, B, HV, K, regime, form, helpers, shares", [
    (330, 1, 1, 64, "mixed", "prod", 2, ((0.0, 2, 0),)),
    (330, 1, 2, 64, "strong", "pre", 1, ((0.0, 3, 0),)),  # a gate of 32 bits: too wide for the tile over kD
    pytest.param(330, 2, 1, 64, "init", "prod", 3, ((0.0, 2, 1),), marks=pytest.mark.slow),  # over batches, dyadic
    pytest.param(600, 1, 2, 64, "strong", "prod", 1, ((0.0, 3, 4),), marks=pytest.mark.slow),
    pytest.param(400, 1, 1, 128, "slow", "prod", 2, ((0.0, 2, 0),), marks=pytest.mark.slow),
])  # fmt: skip
def test_helpers_change_no_bit(monkeypatch, T, B, HV, K, regime, form, helpers, shares):
    call = drawn(T, HV, K, regime, form, B)
    alone = run(rung(NAME, monkeypatch, B * HV, EVERY_SECOND), call)
    helped = rung(NAME, monkeypatch, B * HV + helpers, *shares)
    out = run(helped, call)
    assert all(map(torch.equal, alone, out))
    verdicts = budget.judge(*out, budget.reference(oracle.chunked(**call), **call))
    assert all(v.passed for v in verdicts), verdicts


@pytest.mark.parametrize("regime, form", [("strong", "prod"), pytest.param("init", "pre", marks=pytest.mark.slow)])
def test_no_races_beside_a_helper(monkeypatch, regime, form):
    races, call = Races(), drawn(330, 1, 64, regime, form)
    out = run(rung(NAME, monkeypatch, 2, EVERY_SECOND), call, seed=3, watch=races)
    verdicts = budget.judge(*out, budget.reference(oracle.chunked(**call), **call))
    assert all(v.passed for v in verdicts), verdicts
    assert not races.report()


@pytest.mark.parametrize("rows, sms, expected", [
    (96, 132, (36, 3, 4)), (64, 132, (68, 2, 0)), (24, 132, (108, 2, 0)), (128, 132, (0, 2, 0)), (200, 132, (0, 2, 0)),
])  # fmt: skip
def test_the_idle_sms_decide(monkeypatch, rows, sms, expected):
    module = loader.load(IDEAS / NAME).module
    monkeypatch.setattr(module, "multiprocessors", lambda device: sms)
    problem = type("P", (), {"B": 1, "HV": rows, "V": 128, "NT": 128, "device": torch.device("cpu")})
    assert module.helpers_of(problem) == expected
