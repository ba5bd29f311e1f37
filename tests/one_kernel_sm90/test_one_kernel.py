"""Rung 006's compiled kernel, executed from its PTX on the CPU: the error budget, causality bit by bit, hard inputs,
races, and what ptxas made of it."""

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


@cache
def target():
    from emulator import EmulatedTarget

    return EmulatedTarget("sm_90a")


def drawn(B, T, H, HV, K, V, regime, form, dtype="bfloat16", seed=7, state=True) -> dict:
    return inputs.make(Case("drawn", B, T, H, HV, K, V, dtype=dtype, initial_state=state), regime, form, seed).call()


def run(call: dict, on=None):
    with targets.use(on or target()):
        return loader.load(FOLDER).chunk_kda(**call)


def judged(call: dict) -> list[budget.Verdict]:
    return budget.judge(*run(call), budget.reference(oracle.chunked(**call), **call))


def slow(*case):
    return pytest.param(case, marks=pytest.mark.slow)


@pytest.mark.parametrize("case", [
    (1, 130, 1, 1, 64, 64, "mixed", "prod"),
    (1, 64, 1, 1, 64, 64, "init", "pre"),
    (1, 70, 1, 1, 64, 64, "slow", "prod", "float16"),
    slow(1, 320, 1, 1, 64, 64, "slow", "pre"),
    slow(2, 100, 2, 4, 64, 128, "strong", "pre"),
    slow(1, 192, 1, 1, 128, 128, "strong", "prod"),
    slow(1, 130, 1, 2, 128, 64, "init", "prod"),
    slow(1, 130, 1, 1, 128, 128, "init", "pre"),
    slow(1, 64, 1, 1, 128, 256, "mixed", "pre"),
    slow(1, 1, 1, 2, 64, 192, "strong", "prod"),
    slow(1, 128, 1, 1, 128, 128, "slow", "pre", "float16"),
])  # fmt: skip
def test_within_the_budget(case):
    verdicts = judged(drawn(*case))
    assert all(v.passed for v in verdicts), verdicts


def test_without_a_state_to_start_from():
    verdicts = judged(drawn(1, 100, 1, 1, 64, 64, "slow", "prod", state=False))
    assert all(v.passed for v in verdicts), verdicts


@pytest.mark.parametrize("regime", ["strong", pytest.param("init", marks=pytest.mark.slow)])
def test_no_output_depends_on_a_later_token(regime):
    call, other = (drawn(1, 130, 1, 1, 64, 64, regime, "prod", seed=s) for s in (3, 4))
    before, _ = run(call)
    for cut in (1, 16, 37, 63, 64, 100):
        changed = {n: t.clone() if isinstance(t, torch.Tensor) else t for n, t in call.items()}
        for name in ("q", "k", "v", "g", "beta"):
            changed[name][:, cut:] = other[name][:, cut:]
        after, _ = run(changed)
        assert torch.equal(after[:, :cut], before[:, :cut]), cut
        assert not torch.equal(after[:, cut:], before[:, cut:])


def pre_call(g: torch.Tensor, k: torch.Tensor | None = None, safe_gate: bool = True) -> dict:
    call = drawn(1, g.shape[1], 1, 1, 64, 64, "slow", "pre") | {"g": g, "safe_gate": safe_gate}
    if k is not None:
        call |= {"k": k, "beta": torch.ones_like(call["beta"])}
    return call


@pytest.mark.parametrize("ln_decay", [-5.0, -1e-12])
def test_constant_gates_at_the_bound(ln_decay):
    verdicts = judged(pre_call(torch.full((1, 128, 1, 64), ln_decay)))
    assert all(v.passed for v in verdicts), verdicts


def test_identical_keys_do_not_cancel_in_the_inverse():
    k = torch.nn.functional.normalize(torch.randn(64, generator=torch.Generator().manual_seed(1)), dim=0)
    call = pre_call(torch.full((1, 256, 1, 64), -1e-6), k.bfloat16().expand(1, 256, 1, 64).contiguous())
    verdicts = judged(call)
    assert all(v.passed for v in verdicts), verdicts


@pytest.mark.parametrize("cliff, depth", [(5, -300.0), pytest.param(40, -60.0, marks=pytest.mark.slow)])
def test_gates_beyond_any_bound(cliff, depth):
    """One token forgets everything, its neighbours nearly nothing: no anchor before it serves the rows after it."""
    g = torch.full((1, 128, 1, 64), -0.01)
    g[:, cliff] = g[:, 64 + cliff] = depth
    verdicts = judged(pre_call(g, safe_gate=False))
    assert all(v.passed for v in verdicts), verdicts


@pytest.mark.parametrize("K, regime, form", [
    (64, "strong", "prod"),
    pytest.param(64, "init", "pre", marks=pytest.mark.slow),
    pytest.param(128, "strong", "pre", marks=pytest.mark.slow),
    pytest.param(128, "init", "prod", marks=pytest.mark.slow),
])  # fmt: skip
def test_shared_memory_has_neither_races_nor_unwritten_reads(K, regime, form):
    """Four chunks: every slot is used again. A seed: every warp on its own."""
    from emulator import EmulatedTarget
    from emulator.races import Races

    races = Races()
    call = drawn(1, 200, 1, 1, K, K, regime, form)
    verdicts = budget.judge(
        *run(call, EmulatedTarget("sm_90a", seed=3, watch=races)), budget.reference(oracle.chunked(**call), **call)
    )
    assert not races.report()
    assert all(v.passed for v in verdicts), verdicts


@pytest.mark.slow
@pytest.mark.parametrize(
    "form, gate, bounded, spilled",
    [("prod", "safe", True, 0), ("pre", "log", True, 8), ("prod", "softplus", False, 0), ("pre", "log", False, 0)],
)
def test_spills_and_products_in_flight(form, gate, bounded, spilled):
    rung = loader.load(FOLDER)
    params = rung.module.unit_params(128, 128, "bfloat16", gate, bounded, form == "prod", True)
    artifact = compile_unit(rung.module.unit("sm_90a", **params))
    (row,) = resources(artifact.cubin)
    assert (row.stack, row.local) == (spilled, 0)
    assert waits_in_sass(artifact.cubin) == 5  # R, two halves of A and of O; a serialised kernel waits for each wgmma


def waits_in_sass(cubin: Path) -> int:
    import subprocess

    import triton

    tool = triton.knobs.nvidia.nvdisasm.path
    sass = subprocess.run([tool, "-c", cubin], check=True, capture_output=True, text=True).stdout
    return sass.count("WARPGROUP.DEPBAR")


@pytest.mark.parametrize("bad, name", [({"K": 96}, "K"), ({"V": 96}, "V"), ({"dtype": "float32"}, "dtype"),
                                       ({"v_tile": 32}, "v_tile"), ({"V": 192, "v_tile": 128}, "V"),
                                       ({"g_dtype": "float16"}, "g_dtype"), ({"arch": "sm_80"}, "arch")])  # fmt: skip
def test_refusals_name_the_argument(bad, name):
    p = {"K": 64, "V": 64, **bad}
    arch = p.pop("arch", "sm_90a")
    with pytest.raises((CompileError, ValueError), match=f"{name}: got"):
        compile_unit(Unit("kda_forward", FOLDER / "kda_sm90.py", arch, tuple(p.items())))
