"""Rung 007's compiled kernels, executed from their PTX on the CPU: the fade against its definition, a segment's bits
against an undivided run from where its walk starts, and the rung against the error budget. The walk is tested for both
architectures' state kernels."""

import math
from functools import cache
from pathlib import Path

import pytest
import segments_model as model
import torch

from _common import target as targets
from _common.cache import CallCache
from kernels.kda import budget, hostile, inputs, oracle
from kernels.kda.cases import Case
from kernels.kda.contract import CHUNK, bind
from ladder import loader
from ladder.cells import seed_for

FOLDER = Path(__file__).resolve().parents[2] / "ideas" / "007-segments"


ARCHS = ("sm_90a", "sm_100a")


@cache
def target(arch: str = "sm_90a"):
    from emulator import EmulatedTarget

    return EmulatedTarget(arch)


@cache
def rung():
    return loader.load(FOLDER)


def problem_of(call: dict):
    tensors = {n: call.get(n) for n in ("q", "k", "v", "g", "beta", "initial_state", "A_log", "dt_bias")}
    flags = {"l2norm": "use_qk_l2norm_in_kernel", "use_gate": "use_gate_in_kernel",
             "beta_sigmoid": "use_beta_sigmoid_in_kernel"}  # fmt: skip
    flags = {name: call.get(word, False) for name, word in flags.items()}
    return tensors, bind(tensors, scale=None, output_final_state=True, safe_gate=call["safe_gate"],
                         lower_bound=call.get("lower_bound"), **flags)  # fmt: skip


def drawn(T: int, regime: str, form: str, K: int = 64, HV: int = 1, seed: int = 3, state: bool = True) -> dict:
    return inputs.make(Case("drawn", 1, T, 1, HV, K, K, initial_state=state), regime, form, seed).call()


# ---- the plan ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("B, T, HV, V, segments", [
    (1, 2048, 12, 128, 5), (1, 8192, 24, 128, 2), (1, 32768, 32, 128, 1), (1, 8192, 96, 128, 1), (1, 64, 1, 64, 1),
    (1, 128, 1, 64, 2), (1, 8192, 1, 64, 128), (1, 16384, 1, 64, 128), (2, 1000, 3, 256, 4),
])  # fmt: skip
def test_segments_by_shape(B, T, HV, V, segments):
    """On 132 SMs; never more CTAs than SMs where there is more than one segment."""
    def t(*shape):
        return torch.empty((), dtype=torch.bfloat16).expand(shape)

    call = {"q": t(B, T, HV, 64), "k": t(B, T, HV, 64), "v": t(B, T, HV, V), "g": t(B, T, HV, 64), "beta": t(B, T, HV)}
    p = problem_of({**call, "safe_gate": True})[1]
    length = rung().module.segment_length(p)
    assert -(-p.NT // length) == segments
    assert segments == 1 or segments * B * HV * V // 64 <= 132


# ---- the fade ------------------------------------------------------------------------------------------------------


def fades(call: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """(the prep stage's fade, its definition in fp64), both [B,NT,HV]."""
    tensors, problem = problem_of(call)
    with targets.use(target()):
        got = rung().stages[0].run(problem, tensors)["fade"]
    x = oracle.prepare(**call)
    per_token = x.g.amax(-1) + (x.beta * x.k.square().sum(-1) - 1).abs().clamp_min(1).log()  # [B,T,HV], ln
    want = torch.stack([c.sum(1) for c in per_token.split(CHUNK, 1)], 1) / math.log(2)
    return got, want


@pytest.mark.parametrize("regime, form, T, K", [
    ("strong", "prod", 130, 64), ("init", "prod", 70, 64), ("mixed", "pre", 100, 64),
    pytest.param("strong", "prod", 130, 128, marks=pytest.mark.slow),
    pytest.param("init", "pre", 65, 128, marks=pytest.mark.slow),
    pytest.param("slow", "prod", 65, 128, marks=pytest.mark.slow),
])  # fmt: skip
def test_the_fade_is_its_definition(regime, form, T, K):
    got, want = fades(drawn(T, regime, form, K, HV=2))
    assert torch.allclose(got.double(), want, rtol=1e-4, atol=1e-4), (got, want)


def test_keys_and_betas_that_grow_the_state_open_the_bound():
    call = drawn(128, "strong", "pre", HV=1)
    call["k"] = (call["k"].float() * torch.linspace(0.5, 3, 128)[:, None, None]).bfloat16()
    call["beta"] = call["beta"] * 1.5
    got, want = fades(call)
    assert torch.allclose(got.double(), want, rtol=1e-3, atol=1e-3), (got, want)
    call["beta"] = torch.zeros_like(call["beta"])
    assert (got - fades(call)[0] > 1).any()  # and without them it is lower


# ---- the walk ------------------------------------------------------------------------------------------------------


def operands(B: int, T: int, HV: int, D: int = 64) -> list[torch.Tensor]:
    """qg, w, kg, u, Aqk, gl, h0 of K = V = D as the preparation leaves them; chunks keep a good part of the state."""
    gen = torch.Generator().manual_seed(T)

    def randn(*shape):
        return torch.randn(*shape, generator=gen)

    lower = torch.arange(T).view(T, 1) % CHUNK >= torch.arange(CHUNK)
    return [
        *((randn(B, T, HV, D) * s).bfloat16() for s in (1, 0.3 / D**0.5, 0.3 / D**0.5, 1)),
        (randn(B, T, HV, CHUNK) * 0.2 * lower[None, :, None]).bfloat16(), -randn(B, -(-T // CHUNK), HV, D).abs(),
        randn(B, HV, D, D),
    ]  # fmt: skip


def states(x: list[torch.Tensor], fade=None, length: int = 1 << 20, h0: bool = True, on=None):
    """(o, final state) of the compiled state kernel, undivided without a fade."""
    D, on = x[0].shape[3], on or target()
    unit = rung().module.state_unit(on.arch, K=D, V=D, dtype="bfloat16", segmented=fade is not None, has_h0=h0)
    o, ht = torch.full_like(x[3], float("nan")), torch.full_like(x[6], float("nan"))
    on.load(unit)(*x[:6], fade, x[6] if h0 else None, o, ht, 0.3, length)
    return o, ht


def chunks_of(x: list[torch.Tensor], first: int, last: int, b: int, hv: int) -> list[torch.Tensor]:
    """The operands of chunks [first, last) of one head."""
    rows = slice(first * CHUNK, last * CHUNK)
    picked = [t[b : b + 1, rows, hv : hv + 1].contiguous() for t in x[:5]]
    return [*picked, x[5][b : b + 1, first:last, hv : hv + 1].contiguous(), x[6][b : b + 1, hv : hv + 1].contiguous()]


@pytest.mark.parametrize("arch, length", [(ARCHS[0], 1), (ARCHS[0], 2), (ARCHS[1], 2),
                                          pytest.param(ARCHS[0], 3, marks=pytest.mark.slow)])  # fmt: skip
def test_where_the_bound_never_closes_the_bits_are_those_of_an_undivided_run(arch, length):
    x, on = operands(1, 4 * 64 + 7, 1), target(arch)
    whole, divided = states(x, on=on), states(x, torch.full((1, 5, 1), -0.5), length, on=on)
    assert torch.equal(whole[0], divided[0]) and torch.equal(whole[1], divided[1])


@pytest.mark.parametrize("arch", ARCHS)
def test_each_head_walks_back_to_where_its_own_fades_close(arch):
    """The bits of a segment are those of an undivided run from zero at its start, or from h0 at chunk 0."""
    x, length, NT, on = operands(2, 5 * 64, 2), 2, 5, target(arch)
    fade = torch.zeros(2, NT, 2)
    fade[0, :, 0] = -20.0  # two chunks
    fade[0, :, 1] = -50.0  # one
    fade[1, :, 0] = torch.tensor([-90.0, 1.0, -41.5, 2.0, 0.0])  # the sum must close, not one chunk: 2 opens it again
    fade[1, :, 1] = torch.tensor([-90.0, float("nan"), -90.0, float("nan"), 0.0])  # never
    starts = {(0, 0): [0, 0, 2], (0, 1): [0, 1, 3], (1, 0): [0, 0, 0], (1, 1): [0, 0, 0]}
    fade[1, 2, 0] = -42.5
    starts[1, 0] = [0, 0, 2]
    fade *= model.CLOSED / -40
    o, ht = states(x, fade, length, on=on)
    for (b, hv), wanted in starts.items():
        assert [model.first_chunk(fade[b, :, hv].tolist(), s) for s in (0, 2, 4)] == wanted
        for begin, start in zip((0, 2, 4), wanted):
            end = min(begin + length, NT)
            part, state = states(chunks_of(x, start, end, b, hv), h0=start == 0, on=on)
            rows = slice(begin * CHUNK, end * CHUNK)
            assert torch.equal(o[b, rows, hv], part[0, (begin - start) * CHUNK :, 0]), (b, hv, begin)
            if end == NT:
                assert torch.equal(ht[b, hv], state[0, 0]), (b, hv)


def test_each_chunk_is_stored_once_and_a_walked_one_loads_less():
    """Four segments of a chunk that walk 0, 1, 2 and 3: nobody stores rows of another segment."""
    x, on = operands(1, 4 * 64, 1), target()
    states(x, torch.zeros(1, 4, 1), 1)
    counts = on.device.stats[-1]["by_opcode"]
    stores = sum(n for op, n in counts.items() if op.startswith("cp.async.bulk.tensor") and ".global.shared" in op)
    loads = sum(n for op, n in counts.items() if op.startswith("cp.async.bulk.tensor") and ".global.shared" not in op)
    assert stores == 4
    assert loads == 4 * 6 + 4 * 4 + 6 * 4  # own: w qg gl u kg Aqk; the chunk ahead: no kg, no Aqk; walked: w gl u kg


@pytest.mark.slow
def test_a_walk_of_more_chunks_than_a_warp_has_lanes():
    x, fade = operands(1, 36 * 64, 1), torch.zeros(1, 36, 1)
    fade[:, 1] = 1.25 * model.CLOSED
    o, ht = states(x, fade, 35)
    part, state = states(chunks_of(x, 1, 36, 0, 0), h0=False)
    assert torch.equal(o[0, 35 * CHUNK :, 0], part[0, 34 * CHUNK :, 0]) and torch.equal(ht, state)


@pytest.mark.slow
def test_more_than_one_tile_of_v_and_the_large_key():
    x = operands(1, 3 * 64, 1, 128)
    whole, divided = states(x), states(x, torch.zeros(1, 3, 1), 1)
    assert torch.equal(whole[0], divided[0]) and torch.equal(whole[1], divided[1])


@pytest.mark.parametrize("arch", ARCHS)
def test_shared_memory_has_neither_races_nor_unwritten_reads(arch):
    from emulator import EmulatedTarget
    from emulator.races import Races

    races = Races()
    x = operands(1, 4 * 64, 1)
    fade = torch.tensor([0.0, 0.0, 1.25 * model.CLOSED, 0.0]).view(1, 4, 1)  # walks of 0, 2 (all there is) and 1 or 2 chunks
    states(x, fade, 1, on=EmulatedTarget(arch, seed=3, watch=races))  # a seed: every warp on its own
    assert not races.report()


def test_the_preparation_with_a_fade_has_no_races_either():
    from emulator import EmulatedTarget
    from emulator.races import Races

    races = Races()
    tensors, problem = problem_of(drawn(100, "strong", "pre"))
    with targets.use(EmulatedTarget("sm_90a", seed=3, watch=races)):
        assert rung().stages[0].run(problem, tensors)["fade"] is not None
    assert not races.report()


# ---- the rung ------------------------------------------------------------------------------------------------------


def judged(call: dict, arch: str = "sm_90a", void_above: float = budget.VOID_ABOVE) -> list[budget.Verdict]:
    ref = budget.reference(oracle.chunked(**call), void_above=void_above, **call)
    assert ref.void is None
    with targets.use(target(arch)):
        return budget.judge(*rung().chunk_kda(**call), ref)


@pytest.mark.parametrize("regime, form, arch", [
    ("strong", "prod", ARCHS[0]), ("init", "pre", ARCHS[0]), ("strong", "prod", ARCHS[1]),
    *(pytest.param(*regime_form, ARCHS[0], marks=pytest.mark.slow)
      for regime_form in (("mixed", "prod"), ("slow", "pre"), ("strong", "pre"))),
    pytest.param("init", "pre", ARCHS[1], marks=pytest.mark.slow),
])  # fmt: skip
def test_the_rung_is_within_the_budget(regime, form, arch):
    """Five segments of a chunk, all of which walk back to the first."""
    verdicts = judged(drawn(4 * 64 + 30, regime, form), arch)
    assert all(v.passed for v in verdicts), verdicts


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("spec", [
    "T=286 gate=-5 state=random",  # a chunk closes by itself: all but two of the segments start from zero
    "T=256 gate=-0.35 state=2^126", "T=320 gate=-0.15 values=zero state=random",  # nothing closes: of the first state much is left
])  # fmt: skip
def test_what_is_left_of_a_state_is_not_lost(spec, arch):
    verdicts = judged(hostile.make(spec, 5).call(), arch, hostile.VOID_ABOVE)
    assert all(v.passed for v in verdicts), verdicts


@pytest.mark.parametrize("arch", ARCHS)
def test_a_beta_of_inconvenient_last_digits_bends_no_row(arch):
    """Gates at their bound: the final state is little but the last rows of u, and their errors must not all agree."""
    call = hostile.make("gate=-5", seed_for(1192355563, "gate=-5")).call()
    verdicts = judged(call, arch, hostile.VOID_ABOVE)
    assert all(v.passed for v in verdicts), verdicts


def test_a_state_that_outlives_the_summed_gates_of_every_channel():
    call = model.hopping_call(320, 64, 64)
    verdicts = judged(call)
    assert all(v.passed for v in verdicts), verdicts


@pytest.mark.parametrize("regime, V", [("slow", 64), pytest.param("mixed", 64, marks=pytest.mark.slow)])
def test_slow_gates_give_the_bits_of_one_segment(regime, V, monkeypatch):
    call = drawn(3 * 64, regime, "prod")
    with targets.use(target()):
        divided = rung().chunk_kda(**call)
        monkeypatch.setattr(rung().module, "multiprocessors", lambda device: 1)
        monkeypatch.setattr(rung().module, "CALLS", CallCache())  # plans of a device of 132
        whole = rung().chunk_kda(**call)
    assert torch.equal(divided[0], whole[0]) and torch.equal(divided[1], whole[1])


def test_no_output_depends_on_a_later_token_and_reruns_give_the_same_bits():
    """Where segments start from zero; the changed tokens include some that close a later segment's bound."""
    call, other = (drawn(4 * 64, "strong", "prod", seed=s, state=False) for s in (3, 4))
    with targets.use(target()):
        before, again = (rung().chunk_kda(**call) for _ in range(2))
        assert torch.equal(before[0], again[0]) and torch.equal(before[1], again[1])
        for cut in (100, 192):
            changed = {n: t.clone() if isinstance(t, torch.Tensor) else t for n, t in call.items()}
            for name in ("q", "k", "v", "g", "beta"):
                changed[name][:, cut:] = other[name][:, cut:]
            changed["g"][:, cut:] -= 8  # slow from here on
            assert torch.equal(rung().chunk_kda(**changed)[0][:, :cut], before[0][:, :cut]), cut
