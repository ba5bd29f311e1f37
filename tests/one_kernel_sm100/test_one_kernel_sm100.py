"""Rung 006's Blackwell variant, executed from its PTX on the CPU (never run on a GPU): the error budget, causality bit
by bit, interleavings, races in shared and tensor memory, and what ptxas made of it."""

import re
from functools import cache
from pathlib import Path

import pytest
import torch

from _common import target as targets
from _common.cute import CompileError, Unit, compile_unit
from _common.resources import resources
from kernels.kda import budget, inputs, oracle
from kernels.kda.cases import Case
from ladder import loader

FOLDER = Path(__file__).resolve().parents[2] / "ideas" / "006-one-kernel"
ARCHS = ("sm_100a", "sm_103a")


def emulated(arch="sm_100a", **options):
    from emulator import EmulatedTarget

    return EmulatedTarget(arch, **options)


@cache
def target():
    return emulated()


def drawn(B, T, H, HV, K, V, regime, form, dtype="bfloat16", seed=7, state=True) -> dict:
    return inputs.make(Case("drawn", B, T, H, HV, K, V, dtype=dtype, initial_state=state), regime, form, seed).call()


def run(call: dict, on=None):
    with targets.use(on or target()):
        return loader.load(FOLDER).chunk_kda(**call)


def judged(call: dict, on=None) -> list[budget.Verdict]:
    return budget.judge(*run(call, on), budget.reference(oracle.chunked(**call), **call))


def unit(arch: str, K: int, gate: str = "safe", bounded: bool = True, **params) -> Unit:
    rung = loader.load(FOLDER).module
    return rung.unit(arch, **rung.unit_params(K, K, "bfloat16", gate, bounded, gate != "log", True) | params)


def slow(*case):
    return pytest.param(case, marks=pytest.mark.slow)


@pytest.mark.parametrize("case", [
    (1, 130, 1, 1, 64, 64, "mixed", "prod"),
    (1, 64, 1, 1, 64, 64, "init", "pre"),
    slow(1, 320, 1, 1, 64, 64, "slow", "pre"),
    slow(1, 70, 1, 1, 64, 64, "slow", "prod", "float16"),
    slow(2, 100, 2, 4, 64, 128, "strong", "pre"),
    slow(1, 1, 1, 2, 64, 192, "strong", "prod"),
    slow(1, 192, 1, 1, 128, 128, "strong", "prod"),
    slow(1, 130, 1, 2, 128, 64, "init", "prod"),
    slow(1, 64, 1, 1, 128, 256, "mixed", "pre"),
    slow(1, 128, 1, 1, 128, 128, "slow", "pre", "float16"),
])  # fmt: skip
def test_within_the_budget(case):
    verdicts = judged(drawn(*case))
    assert all(v.passed for v in verdicts), verdicts


@pytest.mark.slow
def test_without_a_state_to_start_from():
    verdicts = judged(drawn(1, 100, 1, 1, 64, 64, "slow", "prod", state=False))
    assert all(v.passed for v in verdicts), verdicts


@pytest.mark.slow
def test_identical_keys_do_not_cancel_in_the_inverse():
    k = torch.nn.functional.normalize(torch.randn(64, generator=torch.Generator().manual_seed(1)), dim=0)
    call = drawn(1, 256, 1, 1, 64, 64, "slow", "pre")
    call |= {"k": k.bfloat16().expand(1, 256, 1, 64).contiguous(), "beta": torch.ones_like(call["beta"])}
    verdicts = judged(call | {"g": torch.full((1, 256, 1, 64), -1e-6), "safe_gate": True})
    assert all(v.passed for v in verdicts), verdicts


@pytest.mark.parametrize("regime", ["strong", pytest.param("init", marks=pytest.mark.slow)])
def test_no_output_depends_on_a_later_token(regime):
    call, other = (drawn(1, 130, 1, 1, 64, 64, regime, "prod", seed=s) for s in (3, 4))
    before, _ = run(call)
    for cut in (37, 64):
        changed = {n: t.clone() if isinstance(t, torch.Tensor) else t for n, t in call.items()}
        for name in ("q", "k", "v", "g", "beta"):
            changed[name][:, cut:] = other[name][:, cut:]
        after, _ = run(changed)
        assert torch.equal(after[:, :cut], before[:, :cut]), cut
        assert not torch.equal(after[:, cut:], before[:, cut:])


@pytest.mark.parametrize("K, regime, form, seeds", [
    (64, "mixed", "prod", (1,)),
    pytest.param(64, "init", "pre", (2, 3), marks=pytest.mark.slow),
    pytest.param(128, "slow", "prod", (4, 5), marks=pytest.mark.slow),
])  # fmt: skip
def test_every_interleaving_gives_the_same_bits_and_no_race(K, regime, form, seeds):
    """Four chunks: every slot, and every stage of tensor memory, is used again."""
    from emulator.races import Races

    call = drawn(1, 200, 1, 1, K, K, regime, form)
    o, state = run(call)
    for seed in seeds:
        races = Races()
        again = run(call, emulated(seed=seed, watch=races))
        assert not races.report()
        assert torch.equal(again[0], o) and torch.equal(again[1], state), seed


@pytest.mark.slow
@pytest.mark.parametrize("gate, bounded", [("safe", True), ("log", True), ("softplus", False), ("log", False)])
def test_no_spills(gate, bounded):
    for arch in ARCHS:
        (row,) = resources(compile_unit(unit(arch, 128, gate, bounded)).cubin)
        assert (row.registers, row.stack, row.local) == (128, 0, 0)  # at launch: 512 threads share 65,536


@pytest.mark.slow
def test_sm_103a_has_the_same_instructions():
    texts = [compile_unit(unit(arch, 64)).ptx.read_text() for arch in ARCHS]
    plain = [re.sub(r"(?m)^\s*\.(target|loc|file)\b.*$|//.*$", "", text) for text in texts]
    assert plain[0] == plain[1] and texts[0] != texts[1]
    verdicts = judged(drawn(1, 100, 1, 1, 64, 64, "strong", "prod"), emulated("sm_103a"))
    assert all(v.passed for v in verdicts), verdicts


@pytest.mark.parametrize("bad, name", [({"K": 96}, "K"), ({"V": 192, "v_tile": 128}, "V"), ({"arch": "sm_90a"}, "arch")])
def test_refusals_name_the_argument(bad, name):
    p = {"K": 64, "V": 64, **bad}
    arch = p.pop("arch", "sm_100a")
    with pytest.raises((CompileError, ValueError), match=f"{name}: got"):
        compile_unit(Unit("kda_forward", FOLDER / "kda_sm100.py", arch, tuple(p.items())))
