"""Hostile problems themselves: what a spec draws, that it can be judged, and that it is drawn again from its line."""

from __future__ import annotations

import pytest
import torch

from kernels.kda import budget, hostile, inputs, oracle

ALL = list(dict.fromkeys(spec for core, more in hostile.FAMILIES.values() for spec in core + more))


def test_every_spec_can_be_judged_and_the_reference_passes_itself():
    """Not void, finite, both forms of the oracle agree, and the low-precision version is within its own budget."""
    for text in ALL:
        if "nan=" in text:
            continue
        call = hostile.make(text, 5).call()
        exact = oracle.recurrent(**call)
        for one, other in zip(oracle.chunked(**call), exact):
            assert budget.row_errors(one, other).max() < 1e-9, text
        reference = budget.reference(exact, hostile.VOID_ABOVE, **call)
        assert reference.void is None, f"{text}: {reference.void}"
        for verdict in budget.judge(*budget.low_precision(**call), reference):
            assert verdict.passed, f"{text}: {verdict.reason}"


def test_specs_are_their_own_names():
    assert len(ALL) > 150
    for text in ALL:
        spec = hostile.parse(text)
        assert hostile.parse(str(spec)) == spec and spec.case.name == str(spec)
        assert hostile.make(str(spec), 1).case == spec.case


FEW = [str(spec) for spec in map(hostile.parse, ALL) if spec.B * spec.T * spec.H < hostile.MANY]


def recurrent(q, k, v, g, beta, scale=None, **flags):
    """Another honest evaluation: token by token in fp32, operands of every product in the type of q (so the state, which
    `budget.low_precision` never rounds within a chunk)."""
    x, rounded = oracle.prepare(q, k, v, g, beta, scale, **flags, dtype=torch.float32), lambda t: t.to(q.dtype).float()
    S, o = x.state.clone(), torch.empty_like(v)
    for t in range(q.shape[1]):
        S, key = x.g[:, t].exp()[..., None] * S, rounded(x.k[:, t])
        error = x.beta[:, t, :, None] * (x.v[:, t] - torch.einsum("bhk,bhkv->bhv", key, rounded(S)))
        S = S + key[..., None] * rounded(error)[..., None, :]
        o[:, t] = x.scale * torch.einsum("bhk,bhkv->bhv", rounded(x.q[:, t]), rounded(S))
    return o, S


def complaints(text, seed):
    call = hostile.make(text, seed).call()
    reference = budget.reference(oracle.recurrent(**call), hostile.VOID_ABOVE, **call)
    return [v.reason for v in budget.judge(*recurrent(**call), reference) if not v.passed]


def test_a_lone_token_is_not_judged_by_a_product_that_cancels(monkeypatch):
    """At seed 210 q . k all but cancels: drawn as it comes, a second honest evaluation is outside the budget of the first, or
    the first is too far off to judge anybody."""
    assert complaints("T=1", 210) == complaints("T=1 form=prod gate=strong", 210) == []
    monkeypatch.setattr(hostile, "MANY", 0)
    assert "exceeds the budget" in complaints("T=1", 210)[0]
    assert "void" in complaints("T=1 form=prod gate=strong", 210)[0]


@pytest.mark.parametrize("text", FEW)
def test_few_tokens_are_judged_alike_by_two_honest_evaluations(text):
    assert [found for seed in range(20) for found in complaints(text, seed)] == []


@pytest.mark.parametrize("text", FEW)
def test_where_tokens_are_few_no_product_of_q_and_k_cancels(text):
    q, k = (hostile.make(text, 3).tensors[name].double() for name in "qk")
    assert torch.nn.functional.cosine_similarity(q, k, dim=-1).abs().min() > 0.98 / q.shape[-1] ** 0.5


def test_where_tokens_are_many_they_are_drawn_as_they_come():
    spec = hostile.parse("T=16 H=2")
    drawn = hostile.make(str(spec), 3).tensors["q"]
    assert torch.equal(drawn, inputs.make(spec.case, "slow", "pre", 3).tensors["q"])


def test_same_seed_same_values():
    text = "T=40 H=2 HV=4 gate=ramp:-5 keys=near values=2^20 state=random layout=strided"
    one, two, other = (hostile.make(text, seed).tensors for seed in (3, 3, 4))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not torch.equal(one["k"], other["k"])


@pytest.mark.parametrize("layout", hostile.LAYOUTS)
def test_layouts_change_strides_and_not_values(layout):
    plain, laid = (hostile.make(f"B=2 T=9 H=2 HV=4 state=random layout={name}", 3).tensors for name in ("plain", layout))
    for name, t in laid.items():
        expected = plain[name][:1].expand_as(t) if layout == "expanded" else plain[name]
        assert torch.equal(t, expected), name
    if layout == "offset":
        assert laid["q"].is_contiguous() and laid["q"].data_ptr() % 16 == 2 and laid["initial_state"].data_ptr() % 16 == 4
    elif layout != "plain":
        assert not laid["q"].is_contiguous() and not laid["initial_state"].is_contiguous()


@pytest.mark.parametrize(("gate", "level"), [("-2.5", -2.5), ("0", 0.0), ("-5", -5.0)])
@pytest.mark.parametrize("form", ["pre", "prod"])
def test_constant_gates_are_what_they_say(form, gate, level):
    """Also where the gate function has to be turned around (to the precision of a bf16 raw gate)."""
    call = hostile.make(f"form={form} gate={gate}", 3).call()
    g = oracle.prepare(**call).g
    assert (g - level).abs().max() <= (0.03 if form == "prod" else 1e-6)


def test_odd_gates_are_what_they_say():
    g = hostile.make("safe=no gate=uneven:-8", 3).tensors["g"]
    assert g[..., ::2].abs().max() == 0 and (g[..., 1::2] == -8).all()
    assert g[0, :16, 0, 1].sum() / torch.log(torch.tensor(2.0)) < -126, "no such decay is a normal fp32 number"
    g = hostile.make("safe=no gate=inf@20", 3).tensors["g"]
    assert torch.isinf(g[:, 20, :, ::2]).all() and torch.isfinite(g[:, 20, :, 1::2]).all() and int(torch.isinf(g).sum()) == 32
    g = hostile.make("gate=ramp:-5", 3).tensors["g"]
    assert g[0, 0, 0, 0] == 0 and g[0, 15, 0, 0] == -5 and g[0, 16, 0, 0] == 0


@pytest.mark.parametrize(("text", "message"), [
    ("T=x", "T: given 'x', accepted: a number"), ("gates=0", "given 'gates=0', accepted: knob=value with the knobs B, T"),
    ("gate=loud", "gate: given 'loud', accepted: slow, strong"), ("keys=lost", "keys: given 'lost', accepted: random, same"),
    ("beta=much", "beta: given 'much', accepted: random, or a number"), ("values=3^2", "given '3^2', accepted: random, zero, 2^N"),
    ("nan=g@64", "nan: given 'g@64', accepted: q, k, v, g or beta @ a token below T = 64"),
    ("gate=inf@900", "gate: given 'inf@900', accepted"), ("layout=folded", "layout: given 'folded', accepted: plain"),
])  # fmt: skip
def test_mistakes_are_one_line(text, message):
    with pytest.raises(hostile.SpecError) as error:
        hostile.make(text, 1)
    assert message in str(error.value) and "\n" not in str(error.value)
