"""The compiled Hopper state kernels, executed from their PTX on the CPU, against the recurrence in fp64.

The emulator also enforces the rules a GPU breaks silently: a register of a wgmma touched before its wait, a missing
wgmma.fence, an mbarrier that never completes.
"""

from functools import cache
from pathlib import Path

import pytest
import torch

from _common.cute import Unit

ROOT = Path(__file__).resolve().parents[2]
PLAIN, PIPELINE = (ROOT / "ideas" / d / "state_sm90.py" for d in ("002-cute-fused", "003-cute-pipeline"))
C = 64
BOUND = {"bfloat16": 4e-3, "float16": 6e-4}  # one rounding to io of o: 2^-9 / sqrt(3), 2^-12 / sqrt(3); with margin


@cache
def target():
    from emulator import EmulatedTarget

    return EmulatedTarget("sm_90a")


def inputs(B, T, HV, K, V, dtype, seed=0):
    """Operands as the intra stage leaves them."""
    gen = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=gen)

    # a channel keeps from nearly all of its state to nearly nothing over a chunk
    step = torch.nn.functional.pad(-(randn(B, T, HV, K) + 2 * randn(HV, K) - 5.5).exp(), (0, 0, 0, 0, 0, -T % C))
    g2 = step.view(B, -1, C, HV, K).cumsum(2).reshape(B, -1, HV, K)[:, :T].contiguous()
    lower = torch.arange(T).view(T, 1) % C >= torch.arange(C)
    return (
        (randn(B, T, HV, K) * g2.exp2()).to(dtype),
        (randn(B, T, HV, K) * g2.exp2() * 0.3 / K**0.5).to(dtype),
        (randn(B, T, HV, K) * 0.3 / K**0.5).to(dtype),
        randn(B, T, HV, V).to(dtype),
        (randn(B, T, HV, C) * 0.2 * lower[None, :, None]).to(dtype),
        g2,
        randn(B, HV, K, V),
    )


def recurrence(qg, w, kg, u, aqk, g2, h0, scale):
    """fp64, rounding h and v' to the io dtype where the kernel does; o is left unrounded."""
    T, io, h, out = qg.shape[1], qg.dtype, h0.double(), []
    for s in range(0, T, C):
        e = min(s + C, T)
        q, w_, k, u_, a = (t[:, s:e].transpose(1, 2).double() for t in (qg, w, kg, u, aqk))
        hb = h.float().to(io).double()
        v = (u_ - w_ @ hb).float().to(io).double()
        out.append((scale * (q @ hb) + a[..., : e - s] @ v).transpose(1, 2))
        h = g2[:, e - 1].double().exp2().unsqueeze(-1) * h + k.transpose(-1, -2) @ v
    return torch.cat(out, 1), h


def run(source, B, T, HV, K, V, dtype="bfloat16", has_h0=True, **params):
    """(operands, o, ht) of one emulated call."""
    unit = Unit("kda_state", source, "sm_90a",
                (("K", K), ("V", V), ("dtype", dtype), ("has_h0", has_h0), *params.items()))  # fmt: skip
    *x, h0 = inputs(B, T, HV, K, V, getattr(torch, dtype), seed=T + K)
    o, ht = torch.full_like(x[3], float("nan")), torch.full_like(h0, float("nan"))
    target().load(unit)(*x, h0 if has_h0 else None, o, ht, 0.3)
    return (*x, h0 if has_h0 else torch.zeros_like(h0)), o, ht


def errors(x, o, ht):
    want, state = recurrence(*x, 0.3)
    return [((got.double() - ref).norm() / ref.norm()).item() for got, ref in ((o, want), (ht, state))]


def check(source, *args, dtype="bfloat16", **params):
    for error in errors(*run(source, *args, dtype=dtype, **params)):
        assert error < BOUND[dtype]  # NaN fails


@pytest.mark.parametrize("source", [PLAIN, PIPELINE], ids=["002", "003"])
def test_small(source):
    check(source, 1, 128, 1, 64, 64)


@pytest.mark.parametrize("name", ["qg", "w", "kg", "u", "aqk", "g2", "h0"])
def test_every_operand_matters(name):
    """A tenth off one operand of the reference is outside the bound: the inputs exercise every term."""
    x, o, ht = run(PLAIN, 1, 128, 1, 64, 64)
    names = ["qg", "w", "kg", "u", "aqk", "g2", "h0"]
    scaled = [t * 0.9 if n == name else t for n, t in zip(names, x, strict=True)]
    assert max(errors(scaled, o, ht)) > 2 * BOUND["bfloat16"]


def test_more_chunks_than_slots_and_a_partial_one():
    check(PIPELINE, 1, 5 * 64 + 7, 1, 64, 64)


def test_two_warpgroups():
    check(PIPELINE, 1, 4 * 64, 1, 64, 128, v_tile=128)


@pytest.mark.slow
@pytest.mark.parametrize("source", [PLAIN, PIPELINE], ids=["002", "003"])
@pytest.mark.parametrize("T", [1, 64, 70, 192])
@pytest.mark.parametrize("dtype, has_h0", [("bfloat16", True), ("float16", False)])
def test_shapes(source, T, dtype, has_h0):
    check(source, 2, T, 2, 128, 128, dtype=dtype, has_h0=has_h0)


@pytest.mark.slow
@pytest.mark.parametrize("K", [64, 128])
def test_two_warpgroups_both_tiles(K):
    check(PIPELINE, 1, 200, 2, K, 256, dtype="float16", v_tile=128)


@pytest.mark.parametrize("bad, name", [({"K": 96}, "K"), ({"V": 96}, "V"), ({"dtype": "float32"}, "dtype"),
                                       ({"v_tile": 32}, "v_tile"), ({"V": 192, "v_tile": 128}, "V"),
                                       ({"arch": "sm_80"}, "arch")])  # fmt: skip
def test_refusals_name_the_argument(bad, name):
    from _common.cute import CompileError, compile_unit

    p = {"K": 64, "V": 64, **bad}
    arch = p.pop("arch", "sm_90a")
    with pytest.raises((CompileError, ValueError), match=f"{name}: got"):
        compile_unit(Unit("kda_state", PIPELINE, arch, tuple(p.items())))
