"""How long the emulator takes for 004's state kernel: K = V = 128, one head, 256 tokens, every tile of V."""

import time

import pytest
import torch

from _common.cute import Unit
from emulator.cute_host import EmulatedTarget
from emulator.mutate import ROOT, RUNGS, SOURCES
from test_cute import operands, reference

LIMIT_S = 8.0  # of processor time, so that a busy machine changes little; compiling does not count


@pytest.mark.parametrize("arch, tiles", [("sm_90a", 64), ("sm_90a", 128), ("sm_100a", None)])
def test_state_kernel(arch, tiles):
    params = (("K", 128), ("V", 128), ("dtype", "bfloat16"), ("has_h0", True)) + ((("v_tile", tiles),) if tiles else ())
    target = EmulatedTarget(arch)
    run = target.load(Unit("kda_state", ROOT / "ideas" / RUNGS["004"] / SOURCES[arch], arch, params))
    given = operands(1, 256, 1, 128, 128)
    o, state = torch.full_like(given[3], float("nan")), torch.full_like(given[6], float("nan"))
    began = time.process_time()
    run(*given, o, state, 128**-0.5)
    took = time.process_time() - began
    want, _ = reference(*given, 128**-0.5)
    assert (o.double() - want).norm() < 0.02 * want.norm()
    assert took < LIMIT_S, f"{took:.1f} s for {sum(s['warp_instructions'] for s in target.device.stats)} warp instructions"
