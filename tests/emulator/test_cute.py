"""CuTe units with their own compiled host code: a small one, and the state kernels of rung 002 on both
architectures."""

from pathlib import Path

import pytest
import torch

import emulator
from _common import target
from _common.cute import Unit
from emulator.cute_host import EmulatedTarget
from emulator.launch import decode

HERE = Path(__file__).parent
STATE = {"sm_90a": "state_sm90.py", "sm_100a": "state_sm100.py"}


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_small_unit(arch):
    emulated = EmulatedTarget(arch)
    with target.use(emulated):
        fn = target.current().load(Unit("scale", HERE / "unit_scale.py", arch))
    a, b = torch.arange(300.0), torch.zeros(300)
    fn(a, b, 2.5)
    assert (b == 2.5 * a).all()
    assert emulated.device.stats[-1]["grid"] == (3, 1, 1) and emulated.device.stats[-1]["block"] == (128, 1, 1)
    with pytest.raises(ValueError, match="expected dtype=float32"):
        fn(a.double(), b, 2.5)  # TVM-FFI's own check
    text = fn.ptx
    fn.ptx = text.replace("st.global", "st.global.frob", 1)
    with pytest.raises(emulator.UnsupportedInstruction, match=r"unit_scale.py:\d+.*frob"):
        fn(a, b, 2.5)  # errors in the launch come through the C frames
    fn.ptx = text
    fn(a, b, -1.0)
    assert (b == -a).all()


def operands(B, T, HV, K, V, seed=0):
    torch.manual_seed(seed)
    io, C = torch.bfloat16, 64
    g2 = torch.cat([-torch.cumsum(torch.rand(B, min(C, T - c), HV, K) * 0.1, 1) for c in range(0, T, C)], 1)
    qg, w = (torch.randn(B, T, HV, K) * 0.1).to(io), (torch.randn(B, T, HV, K) * 0.05).to(io)
    kg = torch.nn.functional.normalize(torch.randn(B, T, HV, K), dim=-1).to(io)
    aqk = torch.randn(B, T, HV, C) * 0.05
    aqk *= (torch.arange(C) <= (torch.arange(T) % C)[:, None])[None, :, None]
    return qg, w, kg, torch.randn(B, T, HV, V).to(io), aqk.to(io), g2, torch.randn(B, HV, K, V)


def reference(qg, w, kg, u, aqk, g2, h0, scale):
    """v' = u - w S; o = scale qg S + Aqk v'; S = 2^(g2 last) S + kg^T v', chunk by chunk, in fp64."""
    T, S, o = qg.shape[1], h0.double(), torch.zeros(u.shape, dtype=torch.double)
    for c in range(0, T, 64):
        s, n = slice(c, min(T, c + 64)), min(T, c + 64) - c
        v = u[:, s].double() - torch.einsum("bthk,bhkv->bthv", w[:, s].double(), S)
        o[:, s] = scale * torch.einsum("bthk,bhkv->bthv", qg[:, s].double(), S) + torch.einsum(
            "bthj,bjhv->bthv", aqk[:, s, :, :n].double(), v
        )
        S = S * g2[:, c + n - 1].double().exp2()[..., None] + torch.einsum("bthk,bthv->bhkv", kg[:, s].double(), v)
    return o, S


def error(a, b):
    n = b.norm(dim=-1)
    return ((a.double() - b).norm(dim=-1) / n.clamp(min=n.mean())).max().item()


def state_unit(arch, K=64, V=64):
    source = HERE.parents[1] / "ideas/002-cute-fused" / STATE[arch]
    return Unit("kda_state", source, arch, (("K", K), ("V", V), ("dtype", "bfloat16"), ("has_h0", True)))


def run_state(emulated, x, edit=None):
    fn = emulated.load(state_unit(emulated.arch, x[0].shape[-1], x[3].shape[-1]))
    if edit:
        assert edit[0] in fn.ptx
        fn.ptx = fn.ptx.replace(*edit)
    o, ht = torch.full(x[3].shape, float("nan"), dtype=torch.bfloat16), torch.full(x[6].shape, float("nan"))
    fn(*x, o, ht, 0.125)
    return o, ht


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_state_kernel(arch):
    x = operands(1, 100, 2, 64, 64)
    want = reference(*x, 0.125)
    first = run_state(EmulatedTarget(arch), x)
    assert error(first[0], want[0]) < 8 * 2.0**-9 and error(first[1], want[1]) < 8 * 2.0**-9
    for seed in (1, 2):
        again = run_state(EmulatedTarget(arch, seed=seed), x)
        assert all(torch.equal(a, b) for a, b in zip(first, again)), seed


@pytest.mark.parametrize(
    "arch, removed, finding",
    [
        ("sm_90a", "wgmma.wait_group.sync.aligned 	0;", "has not waited for"),
        ("sm_90a", "wgmma.fence.sync.aligned;", "since the last wgmma.fence"),
        ("sm_100a", "tcgen05.wait::ld.sync.aligned;", "has not waited for"),
        ("sm_100a", "tcgen05.dealloc", "without freeing tensor memory"),
    ],
)
def test_removed_waits_are_found_at_their_line(arch, removed, finding):
    edit = (removed, "// tcgen05.dealloc" if removed == "tcgen05.dealloc" else "")
    with pytest.raises(emulator.ProtocolError, match=finding) as e:
        run_state(EmulatedTarget(arch), operands(1, 100, 1, 64, 64), edit)
    if "dealloc" not in removed:
        assert STATE[arch] in str(e.value)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_source_lines_of_inline_assembly(arch):
    """The compilers' .loc inside inline assembly counts on from the statement that it stands for."""
    fn = EmulatedTarget(arch).load(state_unit(arch))
    source = state_unit(arch).source.read_text().split("\n")
    (kernel,) = decode(fn.ptx).kernels.values()
    waits = [i for i in kernel.code if i.opcode.startswith("mbarrier.try_wait")]
    assert waits and all("mbarrier_wait(" in source[i.source[1] - 1] for i in waits)
