"""Rung 009's kernel, executed from its PTX on the CPU: helpers change no bit, whatever their number and lead."""

from pathlib import Path

import pytest
import torch

from _common import target as targets
from emulator import EmulatedTarget
from emulator.races import Races
from kernels.kda import budget, inputs, oracle
from kernels.kda.cases import Case
from ladder import loader

FOLDER = Path(__file__).resolve().parents[2] / "ideas" / "009-helpers"


def rung(monkeypatch, sms: int, shares=((0.0, 2, 0),)):
    """The rung on a GPU of so many SMs; shares: (idle SMs for one that walks, period, lead)."""
    rung = loader.load(FOLDER)
    monkeypatch.setattr(rung.module, "multiprocessors", lambda device: sms)
    monkeypatch.setattr(rung.module, "SHARES", shares)
    monkeypatch.setattr(rung.module, "CALLS", type(rung.module.CALLS)())
    return rung


def drawn(T, HV, K, regime, form, B=1, dtype="bfloat16"):
    return inputs.make(Case("drawn", B, T, 1, HV, K, K, dtype=dtype, initial_state=True), regime, form, 7).call()


def run(rung, call, seed=None, watch=None):
    with targets.use(EmulatedTarget("sm_90a", seed=seed, watch=watch)):
        return rung.chunk_kda(**call)


@pytest.mark.parametrize("T, B, HV, K, regime, form, helpers, shares", [
    (330, 1, 1, 64, "mixed", "prod", 2, ((0.0, 2, 0),)),
    (330, 1, 2, 64, "strong", "pre", 1, ((0.0, 3, 0),)),  # a gate of 32 bits: too wide for the tile over kD
    pytest.param(330, 2, 1, 64, "init", "prod", 3, ((0.0, 2, 1),), marks=pytest.mark.slow),  # over batches, dyadic
    pytest.param(600, 1, 2, 64, "strong", "prod", 1, ((0.0, 3, 4),), marks=pytest.mark.slow),
    pytest.param(400, 1, 1, 128, "slow", "prod", 2, ((0.0, 2, 0),), marks=pytest.mark.slow),
])  # fmt: skip
def test_helpers_change_no_bit(monkeypatch, T, B, HV, K, regime, form, helpers, shares):
    call = drawn(T, HV, K, regime, form, B)
    alone = run(rung(monkeypatch, B * HV), call)
    helped = rung(monkeypatch, B * HV + helpers, shares)
    out = run(helped, call)
    assert all(map(torch.equal, alone, out))
    verdicts = budget.judge(*out, budget.reference(oracle.chunked(**call), **call))
    assert all(v.passed for v in verdicts), verdicts


@pytest.mark.parametrize("regime, form", [("strong", "prod"), pytest.param("init", "pre", marks=pytest.mark.slow)])
def test_no_races_beside_a_helper(monkeypatch, regime, form):
    races, call = Races(), drawn(330, 1, 64, regime, form)
    out = run(rung(monkeypatch, 2), call, seed=3, watch=races)
    verdicts = budget.judge(*out, budget.reference(oracle.chunked(**call), **call))
    assert all(v.passed for v in verdicts), verdicts
    assert not races.report()


@pytest.mark.parametrize("rows, sms, expected", [
    (96, 132, (36, 3, 4)), (64, 132, (68, 2, 0)), (24, 132, (108, 2, 0)), (128, 132, (0, 2, 0)), (200, 132, (0, 2, 0)),
])  # fmt: skip
def test_the_idle_sms_decide(monkeypatch, rows, sms, expected):
    module = loader.load(FOLDER).module
    monkeypatch.setattr(module, "multiprocessors", lambda device: sms)
    problem = type("P", (), {"B": 1, "HV": rows, "V": 128, "NT": 128, "device": torch.device("cpu")})
    assert module.helpers_of(problem) == expected
