"""Rungs whose helpers prepare runs of chunks, executed from their PTX on the CPU: who prepares a chunk changes no bit,
whatever the schedule."""

import pytest
import torch

from emulator.races import Races
from kernels.kda import budget, oracle
from ladder import loader
from tests.helped import IDEAS, drawn, run, slow
from tests.helped import rung as helped_rung

FALSIFIED = ("011-split-helpers", "012-early-fill")


@pytest.fixture(params=["010-received-runs", *(pytest.param(name, marks=pytest.mark.slow) for name in FALSIFIED)])
def name(request) -> str:
    return request.param


def rung(name: str, monkeypatch, sms: int, own: int, run: int, lead: int, columns: int = 128):
    """The rung with one schedule for all shapes."""
    return helped_rung(name, monkeypatch, sms, (0.0, columns, own, run, lead))


@pytest.mark.parametrize("T, B, HV, K, regime, form, helpers, schedule", [
    (330, 1, 1, 64, "mixed", "prod", 2, (0, 1, 1)),  # all but the first
    (500, 1, 1, 64, "strong", "prod", 3, (1, 3, 1)),
    (450, 1, 2, 64, "strong", "pre", 3, (1, 2, 0)),  # a gate of 32 bits: too wide for the tile over kD
    slow(600, 2, 1, 64, "init", "prod", 3, (2, 3, 1)),  # over batches, dyadic
    slow(640, 1, 2, 64, "slow", "pre", 5, (1, 4, 2)),
    slow(400, 1, 3, 64, "slow", "prod", 2, (0, 1, 2)),
    slow(460, 1, 1, 128, "slow", "prod", 2, (1, 2, 1)),
    slow(330, 1, 1, 128, "mixed", "prod", 3, (0, 1, 1, 64)),  # two CTAs walk a row
])  # fmt: skip
def test_helpers_change_no_bit(name, monkeypatch, T, B, HV, K, regime, form, helpers, schedule):
    call = drawn(T, HV, K, regime, form, B)
    alone = run(rung(name, monkeypatch, B * HV, *schedule[:3]), call)
    walking = B * HV * (K // min(schedule[3], K) if schedule[3:] else 1)
    helped = rung(name, monkeypatch, walking + helpers, *schedule)
    out = run(helped, call)
    assert all(map(torch.equal, alone, out))
    verdicts = budget.judge(*out, budget.reference(oracle.chunked(**call), **call))
    assert all(v.passed for v in verdicts), verdicts


@pytest.mark.slow
@pytest.mark.parametrize("falsified", FALSIFIED)
@pytest.mark.parametrize("regime, form, sms, schedule", [
    ("strong", "prod", 3, (0, 1, 1)), ("mixed", "pre", 4, (0, 1, 1, 64)), ("mixed", "pre", 3, (1, 2, 2)),
    ("strong", "prod", 4, (1, 3, 1, 64)), ("init", "prod", 3, (2, 1, 2)),
])  # fmt: skip
def test_the_bits_are_the_parents(monkeypatch, falsified, regime, form, sms, schedule):
    call = drawn(390, 1, 128, regime, form)
    ours, parents = (run(rung(name, monkeypatch, sms, *schedule), call) for name in (falsified, "010-received-runs"))
    assert all(map(torch.equal, ours, parents))


@pytest.mark.parametrize("regime, form, schedule", [
    ("strong", "prod", (1, 2, 0)), ("mixed", "prod", (0, 1, 1)), slow("init", "pre", (1, 3, 0)),
    slow("slow", "pre", (0, 1, 2)), slow("strong", "prod", (2, 3, 1)),
])  # fmt: skip
def test_no_races_beside_a_helper(name, monkeypatch, regime, form, schedule):
    races, call = Races(), drawn(450, 1, 64, regime, form)
    out = run(rung(name, monkeypatch, 2, *schedule), call, seed=3, watch=races)
    verdicts = budget.judge(*out, budget.reference(oracle.chunked(**call), **call))
    assert all(v.passed for v in verdicts), verdicts
    assert not races.report()


@pytest.mark.parametrize("own, run, lead", [(1, 1, 0), (2, 1, 4), (1, 2, 5), (2, 3, 1), (0, 1, 1), (0, 1, 3), (3, 2, 2)])
@pytest.mark.parametrize("helpers, B, HV", [(1, 1, 1), (7, 2, 3), (5, 1, 2), (13, 2, 2)])
def test_every_chunk_is_prepared_once(name, own, run, lead, helpers, B, HV):
    """The jobs of all CTAs, counted with the schedule's own arithmetic in Python."""
    module = loader.load(IDEAS / name).module
    chunks, rows = 23, B * HV
    problem = type("P", (), {"B": B, "HV": HV, "NT": chunks})
    shipped = [c for c in range(lead, chunks) if (c - lead) % (own + run) >= own]
    tasks = [(c, row // HV, row % HV) for c in shipped for row in range(rows)]
    assert len(tasks) == module.shipped_chunks(problem, own, run, lead)
    turns, rest = divmod(helpers, rows)
    for bid in range(helpers):
        row, turn = bid % rows, bid // rows
        c, u, b, hv = lead + own + turn + turn // run * own, turn % run, row // HV, row % HV
        for task in tasks[bid::helpers]:
            assert (c, b, hv) == task
            hv += rest % HV
            b += rest // HV + (hv >= HV)
            hv -= HV * (hv >= HV)
            carry = int(b >= B)
            b -= B * carry
            u += turns % run + carry
            c += turns + turns // run * own + carry + (own if u >= run else 0)
            u -= run * (u >= run)


@pytest.mark.parametrize("rows, chunks, sms, expected", [
    (96, 128, 132, (128, 36, 2, 1, 2)), (64, 128, 132, (128, 68, 1, 2, 2)), (32, 512, 132, (128, 100, 0, 1, 1)),
    (24, 128, 132, (64, 84, 0, 1, 1)), (12, 2, 132, (64, 12, 0, 1, 1)), (12, 1, 132, (128, 0, 1, 1, 0)),
    (128, 64, 132, (128, 0, 1, 1, 0)), (200, 128, 132, (128, 0, 1, 1, 0)),
])  # fmt: skip
def test_the_idle_sms_decide(monkeypatch, rows, chunks, sms, expected):
    module = loader.load(IDEAS / "010-received-runs").module
    monkeypatch.setattr(module, "multiprocessors", lambda device: sms)
    problem = type("P", (), {"B": 1, "HV": rows, "V": 128, "NT": chunks, "device": torch.device("cpu")})
    assert module.schedule(problem) == expected
