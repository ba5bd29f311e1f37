"""Hostile problems themselves: what a spec draws, that it can be judged, and that it is drawn again from its line."""

from __future__ import annotations

import pytest
import torch

from kernels.kda import budget, hostile, oracle

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
