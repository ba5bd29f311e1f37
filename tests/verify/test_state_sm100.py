"""The Blackwell state kernels, executed by the emulator, against the recurrence in fp64 with fla's rounding points."""

import pytest
import torch

from _common.cute import Unit, compile_unit, import_source
from _common.resources import resources
from emulator.cute_host import EmulatedTarget
from ladder.manifest import ROOT

KERNELS = {n: ROOT / "ideas" / slug / "state_sm100.py" for n, slug in ((2, "002-cute-fused"), (3, "003-cute-pipeline"))}
C = 64


def unit(rung, arch="sm_100a", **params):
    return Unit("kda_state", KERNELS[rung], arch, tuple(params.items()))


def inputs(B, T, HV, K, V, io, has_h0):
    g = torch.Generator().manual_seed(T + K)

    def normal(*shape, size=1.0):
        return torch.randn(*shape, generator=g) * size

    qg, w, kg = (normal(B, T, HV, K, size=s).to(io) for s in (0.3, 0.1, 0.1))
    row = torch.arange(T)[:, None] % C
    aqk = torch.where((torch.arange(C) <= row)[None, :, None], normal(B, T, HV, C, size=0.2), 0.0).to(io)
    g2 = -torch.rand(B, T, HV, K, generator=g)
    for start in range(0, T, C):
        g2[:, start : start + C] = g2[:, start : start + C].cumsum(1) * 0.05
    h0 = normal(B, HV, K, V) if has_h0 else None
    return qg, w, kg, normal(B, T, HV, V).to(io), aqk, g2, h0


def recurrence(qg, w, kg, u, aqk, g2, h0, scale):
    """o and ht in fp64; h and v' rounded where they are operands."""
    io, (B, T, HV, K), V = qg.dtype, qg.shape, u.shape[3]
    h = torch.zeros(B, HV, K, V, dtype=torch.float64) if h0 is None else h0.double()
    o = torch.empty(B, T, HV, V, dtype=torch.float64)
    for start in range(0, T, C):
        rows = slice(start, min(start + C, T))
        q_c, w_c, k_c, u_c, a_c = (x[:, rows].double().transpose(1, 2) for x in (qg, w, kg, u, aqk))
        operand = h.to(io).double()
        v = (u_c - w_c @ operand).to(io).double()
        o[:, rows] = (scale * (q_c @ operand) + a_c[..., : rows.stop - rows.start] @ v).transpose(1, 2)
        h = torch.exp2(g2[:, rows.stop - 1].double())[..., None] * h + k_c.transpose(-1, -2) @ v
    return o, h


@pytest.mark.parametrize("rung", KERNELS)
@pytest.mark.parametrize(
    "B, T, HV, K, V, dtype, has_h0",
    [
        (1, 64, 1, 128, 64, "bfloat16", True),
        (2, 130, 2, 64, 128, "float16", False),  # heads, batches and V tiles apart; a partial third chunk
        (1, 1, 1, 64, 64, "bfloat16", True),
    ],
)
def test_numbers(rung, B, T, HV, K, V, dtype, has_h0):
    io = getattr(torch, dtype)
    x = inputs(B, T, HV, K, V, io, has_h0)
    o = torch.full((B, T, HV, V), float("nan"), dtype=io)
    ht = torch.full((B, HV, K, V), float("nan"))
    run = EmulatedTarget("sm_100a").load(unit(rung, K=K, V=V, dtype=dtype, has_h0=has_h0))
    run(*x, o, ht, K**-0.5)
    want_o, want_ht = recurrence(*x, K**-0.5)
    # o: its own rounding, and v' or h falling on the other side of a rounding boundary in fp32; ht: the latter alone
    step = torch.finfo(io).eps
    assert (o.double() - want_o).abs().max() <= step * want_o.abs().max()
    assert (ht.double() - want_ht).abs().max() <= step / 4 * want_ht.abs().max()


@pytest.mark.parametrize("arch", ["sm_100a", "sm_103a"])
@pytest.mark.parametrize("rung", KERNELS)
def test_no_spills(rung, arch):
    (found,) = resources(compile_unit(unit(rung, arch, K=128, V=128, dtype="bfloat16", has_h0=True)).cubin)
    assert found.stack == found.local == 0 and found.registers <= (255 if rung == 2 else 168), found


@pytest.mark.parametrize("rung", KERNELS)
@pytest.mark.parametrize(
    "given, said",
    [
        ({"arch": "sm_90a"}, "arch: got 'sm_90a', accepted: sm_100a, sm_103a"),
        ({"K": 96}, "K: got 96, accepted: 64, 128"),
        ({"V": 96}, "V: got 96, accepted: multiples of 64"),
        ({"dtype": "float32"}, "dtype: got 'float32', accepted: bfloat16, float16"),
    ],
)
def test_refusals(rung, given, said):
    with pytest.raises(ValueError, match=said):
        import_source(KERNELS[rung]).build(**{"arch": "sm_100a", "K": 128, "V": 128, "dtype": "bfloat16", **given})
