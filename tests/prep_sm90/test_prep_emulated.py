"""Rung 005's compiled kernels, executed from their PTX on the CPU: the preparation against its definition in fp64, its
causality bit by bit, hard inputs, and the whole rung against the error budget. What the Blackwell build does otherwise
(w and u, the state kernel) is tested for both."""

from functools import cache
from pathlib import Path

import prep_reference as ref
import pytest
import torch

from _common import target as targets
from kernels.kda import budget, hostile, inputs, oracle
from kernels.kda.cases import Case
from ladder import loader
from ladder.cells import seed_for

FOLDER = Path(__file__).resolve().parents[2] / "ideas" / "005-fused-prep"
BOUND = {"bfloat16": 1e-2, "float16": 1.3e-3}  # two roundings of operands and one of the result, worst row


ARCHS = ("sm_90a", "sm_100a")


@cache
def target(arch: str = "sm_90a"):
    from emulator import EmulatedTarget

    return EmulatedTarget(arch)


def prepared(call: dict, on=None) -> dict[str, torch.Tensor]:
    """The outputs of the rung's prep stage."""
    from kernels.kda.contract import bind

    rung = loader.load(FOLDER)
    tensors = {n: call.get(n) for n in ("q", "k", "v", "g", "beta", "initial_state", "A_log", "dt_bias")}
    flags = {"l2norm": "use_qk_l2norm_in_kernel", "use_gate": "use_gate_in_kernel",
             "beta_sigmoid": "use_beta_sigmoid_in_kernel"}  # fmt: skip
    flags = {name: call.get(word, False) for name, word in flags.items()}
    problem = bind(tensors, scale=None, output_final_state=False, safe_gate=call["safe_gate"],
                   lower_bound=call.get("lower_bound"), **flags)  # fmt: skip
    with targets.use(on or target()):
        return rung.stages[0].run(problem, tensors)


def drawn(B, T, H, HV, K, V, regime, form, dtype="bfloat16", seed=3) -> dict:
    return inputs.make(Case("drawn", B, T, H, HV, K, V, dtype=dtype), regime, form, seed).call()


def worst(out: dict, call: dict) -> dict[str, float]:
    want = ref.reference(call)
    return {n: budget.row_errors(out[n], want[n]).nan_to_num(float("inf")).max().item() for n in ref.OUTPUTS}


CASES = [
    (1, 64, 1, 2, 128, 128, "strong", "prod"),
    (1, 70, 1, 1, 64, 64, "mixed", "pre"),
    (1, 130, 1, 1, 128, 128, "init", "prod"),
    pytest.param((2, 100, 2, 4, 128, 128, "slow", "prod"), marks=pytest.mark.slow),
    pytest.param((1, 64, 1, 1, 128, 256, "mixed", "prod"), marks=pytest.mark.slow),
    pytest.param((1, 1, 1, 2, 128, 128, "strong", "prod"), marks=pytest.mark.slow),
    pytest.param((1, 100, 1, 1, 64, 64, "init", "prod"), marks=pytest.mark.slow),
    pytest.param((1, 64, 1, 1, 64, 192, "init", "pre"), marks=pytest.mark.slow),
]


@pytest.mark.parametrize("case", CASES)
def test_every_output_row_agrees_with_its_definition(case):
    call = drawn(*case)
    errors = worst(prepared(call), call)
    assert max(errors.values()) < BOUND["bfloat16"], errors
    assert errors["gl"] < 1e-5, errors


@pytest.mark.parametrize("case", [
    (1, 70, 1, 1, 64, 128, "init", "pre"), pytest.param((1, 130, 1, 2, 128, 128, "strong", "prod"), marks=pytest.mark.slow),
])  # fmt: skip
def test_every_output_row_agrees_with_its_definition_on_blackwell(case):
    call = drawn(*case)
    errors = worst(prepared(call, target("sm_100a")), call)
    assert max(errors.values()) < BOUND["bfloat16"], errors


@pytest.mark.slow
@pytest.mark.parametrize("regime, form", [("strong", "prod"), ("slow", "pre"), ("init", "prod")])
def test_fp16(regime, form):
    call = drawn(1, 64, 1, 1, 128, 128, regime, form, dtype="float16")
    errors = worst(prepared(call), call)
    assert max(errors.values()) < BOUND["float16"], errors


def test_aqk_is_zero_above_the_diagonal():
    call = drawn(1, 64, 1, 2, 128, 128, "strong", "prod")
    upper = torch.ones(64, 64, dtype=torch.bool).triu(1)
    assert (prepared(call)["Aqk"][0].transpose(0, 1)[:, upper] == 0).all()


@pytest.mark.parametrize("regime", ["strong", "init"])
def test_no_output_of_a_row_depends_on_a_later_row(regime):
    call, other = (drawn(1, 64, 1, 1, 128, 128, regime, "prod", seed=s) for s in (3, 4))
    before = prepared(call)
    for cut in (1, 15, 16, 37, 63):
        changed = {n: t.clone() if isinstance(t, torch.Tensor) else t for n, t in call.items()}
        for name in ("q", "k", "v", "g", "beta"):
            changed[name][:, cut:] = other[name][:, cut:]
        after = prepared(changed)
        for name in ("qg", "w", "u", "Aqk"):
            assert torch.equal(after[name][:, :cut], before[name][:, :cut]), (name, cut)


@pytest.mark.parametrize("arch, dtype", [(ARCHS[0], "bfloat16"), (ARCHS[1], "bfloat16"),
                                         pytest.param(ARCHS[0], "float16", marks=pytest.mark.slow)])  # fmt: skip
def test_the_diagonal_of_the_inverse_times_beta_is_not_rounded(arch, dtype):
    """Without keys u is beta v: rounded once, at the end. (Beta rounded as well would err by up to twice as much.)"""
    call = drawn(1, 64, 1, 1, 64, 64, "slow", "pre", dtype)
    call["k"] = torch.zeros_like(call["k"])
    exact = call["beta"].double()[..., None] * call["v"].double()
    error = (prepared(call, target(arch))["u"].double() - exact).abs() / exact.abs().clamp_min(1e-4)
    assert error.max() < torch.finfo(call["v"].dtype).eps / 2 * 1.01, error.max()


@pytest.mark.parametrize("arch", ARCHS)
def test_a_beta_of_inconvenient_last_digits_bends_no_row(arch):
    """Gates at their bound: the final state is little but the last rows of u, and their errors must not all agree."""
    call = hostile.make("gate=-5", seed_for(1192355563, "gate=-5")).call()
    ref = budget.reference(oracle.chunked(**call), void_above=hostile.VOID_ABOVE, **call)
    with targets.use(target(arch)):
        verdicts = budget.judge(*loader.load(FOLDER).chunk_kda(**call), ref)
    assert all(v.passed for v in verdicts), verdicts


def pre_call(g: torch.Tensor, k: torch.Tensor | None = None, safe_gate: bool = True) -> dict:
    call = drawn(1, g.shape[1], 1, 1, 128, 128, "slow", "pre")
    call |= {"g": g, "safe_gate": safe_gate}
    if k is not None:
        call |= {"k": k, "beta": torch.ones_like(call["beta"])}
    return call


@pytest.mark.parametrize("ln_decay", [-5.0, -2.5, -1e-12])
def test_constant_gates_at_the_bound(ln_decay):
    call = pre_call(torch.full((1, 64, 1, 128), ln_decay))
    errors = worst(prepared(call), call)
    assert max(errors.values()) < BOUND["bfloat16"], errors


def test_identical_keys_do_not_cancel_in_the_inverse():
    k = torch.nn.functional.normalize(torch.randn(128, generator=torch.Generator().manual_seed(1)), dim=0)
    call = pre_call(torch.full((1, 64, 1, 128), -1e-6), k.bfloat16().expand(1, 64, 1, 128).contiguous())
    errors = worst(prepared(call), call)
    assert max(errors.values()) < 2 * BOUND["bfloat16"], errors


@pytest.mark.parametrize("cliff, depth", [(0, -60.0), (5, -300.0), (16, -300.0), (40, -300.0)])
def test_gates_beyond_any_bound(cliff, depth):
    """One token forgets everything, its neighbours nearly nothing: no anchor before it serves the rows after it."""
    g = torch.full((1, 64, 1, 128), -0.01)
    g[:, cliff] = depth
    call = pre_call(g, safe_gate=False)
    errors = worst(prepared(call), call)
    errors.pop("gl")  # floored at -256 a token, where its exponential is 0 either way
    assert max(errors.values()) < BOUND["bfloat16"], errors


@pytest.mark.parametrize("regime, form, T, arch", [
    ("mixed", "prod", 130, ARCHS[0]), ("init", "pre", 64, ARCHS[0]), ("mixed", "prod", 200, ARCHS[1]),
    pytest.param("init", "pre", 64, ARCHS[1], marks=pytest.mark.slow),
])  # fmt: skip
def test_the_rung_is_within_the_budget(regime, form, T, arch):
    call = inputs.make(Case("rung", 1, T, 1, 1, 64, 64, initial_state=True), regime, form, seed=7).call()
    with targets.use(target(arch)):
        o, state = loader.load(FOLDER).chunk_kda(**call)
    verdicts = budget.judge(o, state, budget.reference(oracle.chunked(**call), **call))
    assert all(v.passed for v in verdicts), verdicts


@pytest.mark.parametrize("K", [64, pytest.param(128, marks=pytest.mark.slow)])
@pytest.mark.parametrize("regime", ["strong", "init"])
def test_shared_memory_has_neither_races_nor_unwritten_reads(regime, K):
    from emulator import EmulatedTarget
    from emulator.races import Races

    races = Races()
    call = drawn(1, 64, 1, 1, K, K, regime, "prod")
    prepared(call, EmulatedTarget("sm_90a", seed=3, watch=races))  # a seed: every warp on its own
    assert not races.report()


@pytest.mark.parametrize("arch", ARCHS)
def test_the_whole_rung_has_no_races_either(arch):
    """Five chunks: every ring of the state kernel goes round."""
    from emulator import EmulatedTarget
    from emulator.races import Races

    races = Races()
    call = drawn(1, 5 * 64, 1, 1, 64, 64, "mixed", "pre")
    with targets.use(EmulatedTarget(arch, seed=4, watch=races)):
        loader.load(FOLDER).chunk_kda(**call)
    assert not races.report()
