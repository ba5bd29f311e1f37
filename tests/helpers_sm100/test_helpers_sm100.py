"""Rung 009's Blackwell variant, executed from its PTX on the CPU (never run on a GPU): helpers change no bit and allocate no
tensor memory, nothing is found beside them, and what ptxas made of it."""

import re

import pytest
import torch

from _common.cute import CompileError, Unit, compile_unit
from _common.resources import resources
from emulator.launch import Device
from emulator.memwatch import MemoryWatch
from emulator.races import Races
from emulator.watch import Together
from kernels.kda import budget, oracle
from ladder import loader
from tests.helped import IDEAS, drawn, guarded, rung, run, slow

NAME = "009-helpers"
EVERY_SECOND = (0.0, 2, 0)  # idle SMs for one that walks, period, lead
ARCHS = ("sm_100a", "sm_103a")
GATES = (("safe", True), ("log", True), ("softplus", False), ("log", False))


def unit(arch: str, K: int, gate: str = "safe", bounded: bool = True, has_h0: bool = True) -> Unit:
    module = loader.load(IDEAS / NAME).module
    return module.unit(arch, **module.unit_params(K, K, "bfloat16", gate, bounded, gate != "log", has_h0))


@pytest.mark.parametrize("T, B, HV, K, V, regime, form, helpers, shares", [
    (330, 1, 1, 64, 64, "mixed", "prod", 2, ((0.0, 2, 0),)),
    (330, 1, 2, 64, 64, "strong", "pre", 1, ((0.0, 3, 0),)),  # a gate of 32 bits: too wide for the tile over kD
    slow(330, 2, 1, 64, 64, "init", "prod", 3, ((0.0, 2, 1),)),  # over batches, dyadic
    slow(600, 1, 2, 64, 64, "strong", "prod", 1, ((0.0, 3, 4),)),
    slow(400, 1, 1, 128, 128, "slow", "prod", 2, ((0.0, 2, 0),)),
    slow(330, 1, 1, 128, 256, "strong", "pre", 1, ((0.0, 2, 0),)),  # two CTAs receive the same chunks
])  # fmt: skip
def test_helpers_change_no_bit(monkeypatch, T, B, HV, K, V, regime, form, helpers, shares):
    call, device = drawn(T, HV, K, regime, form, B, V), Device("sm_100a")
    walking = B * HV * (-(-V // 128))
    alone = run(rung(NAME, monkeypatch, walking, EVERY_SECOND), call, "sm_100a")
    out = run(rung(NAME, monkeypatch, walking + helpers, *shares), call, "sm_100a", device=device)
    assert all(map(torch.equal, alone, out))
    verdicts = budget.judge(*out, budget.reference(oracle.chunked(**call), **call))
    assert all(v.passed for v in verdicts), verdicts
    (_, period, lead), executed = shares[0], device.stats[0]["by_opcode"]
    expected = {"st.release": B * HV * ((-(-T // 64) - lead) // period), "tcgen05.alloc": walking, "tcgen05.dealloc": walking}
    assert expected == {op: sum(n for name, n in executed.items() if name.startswith(op)) for op in expected}


def watched(rung, call, seed):
    """(o and final state, findings) of one call in a random order."""
    memory = MemoryWatch()
    device = Device("sm_100a", seed, Together(Races(), memory))
    return guarded(rung, call, device, memory), device.watch.report()


@pytest.mark.parametrize("regime, form, seeds", [("strong", "prod", (3,)), slow("init", "pre", (4, 5)), slow("slow", "pre", (6,))])
def test_every_interleaving_gives_the_same_bits_and_no_finding(monkeypatch, regime, form, seeds):
    call, helped = drawn(330, 1, 64, regime, form), rung(NAME, monkeypatch, 2, EVERY_SECOND)
    expected = run(helped, call, "sm_100a")
    for seed in seeds:
        out, found = watched(helped, call, seed)
        assert not found
        assert all(map(torch.equal, expected, out)), seed


@pytest.mark.slow
@pytest.mark.parametrize("gate, bounded", GATES)
def test_no_spills(gate, bounded):
    for K, at_launch in ((64, 168), (128, 128)):  # 384 and 512 threads share 65,536
        for arch in ARCHS:
            for has_h0 in (False, True):
                (row,) = resources(compile_unit(unit(arch, K, gate, bounded, has_h0)).cubin)
                assert row.registers <= at_launch and (row.stack, row.local) == (0, 0)


@pytest.mark.slow
def test_sm_103a_has_the_same_instructions():
    texts = [compile_unit(unit(arch, 64)).ptx.read_text() for arch in ARCHS]
    plain = [re.sub(r"(?m)^\s*\.(target|loc|file)\b.*$|//.*$", "", text) for text in texts]
    assert plain[0] == plain[1] and texts[0] != texts[1]


@pytest.mark.parametrize("bad, name", [({"K": 96}, "K"), ({"V": 192, "v_tile": 128}, "V"), ({"arch": "sm_90a"}, "arch")])
def test_refusals_name_the_argument(bad, name):
    p = {"K": 64, "V": 64, **bad}
    arch = p.pop("arch", "sm_100a")
    with pytest.raises((CompileError, ValueError), match=f"{name}: got"):
        compile_unit(Unit("kda_forward", IDEAS / NAME / "kda_sm100.py", arch, tuple(p.items())))
