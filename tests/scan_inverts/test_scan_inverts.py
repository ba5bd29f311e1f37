"""Rung 008's kernel, executed from its PTX on the CPU: the budget, and no race."""

from pathlib import Path

import pytest

from _common import target as targets
from emulator import EmulatedTarget
from emulator.races import Races
from kernels.kda import budget, inputs, oracle
from kernels.kda.cases import Case
from ladder import loader

FOLDER = Path(__file__).resolve().parents[2] / "ideas" / "008-scan-inverts"


@pytest.mark.parametrize("K, regime, form", [
    (64, "mixed", "prod"),
    pytest.param(128, "strong", "pre", marks=pytest.mark.slow),
    pytest.param(128, "init", "prod", marks=pytest.mark.slow),
])  # fmt: skip
def test_right_and_without_races(K, regime, form):
    races = Races()
    call = inputs.make(Case("drawn", 1, 200, 1, 1, K, K, initial_state=True), regime, form, 7).call()
    with targets.use(EmulatedTarget("sm_90a", seed=3, watch=races)):
        out = loader.load(FOLDER).chunk_kda(**call)
    verdicts = budget.judge(*out, budget.reference(oracle.chunked(**call), **call))
    assert all(v.passed for v in verdicts), verdicts
    assert not races.report()
