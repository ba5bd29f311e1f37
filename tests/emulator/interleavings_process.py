"""Runs a whole rung, Triton stages and all, under the fixed schedule and seeded ones in this process, watched; one JSON
line per schedule. Arguments: folder of the rung, arch, seeds."""

import json
import sys
import warnings
import zlib
from pathlib import Path

import torch

from _common import target
from emulator import EmulatedTarget, triton_driver
from emulator.memwatch import MemoryWatch
from emulator.races import Races
from emulator.watch import Together


def main(folder, arch, seeds):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    device = triton_driver.activate(arch)
    target.install(EmulatedTarget(arch, device=device))
    from kernels.kda import budget, inputs, oracle
    from kernels.kda.cases import Case
    from ladder.loader import load

    rung = load(Path(folder))
    drawn = inputs.make(Case("interleavings", 1, 200, 1, 1, 64, 64, initial_state=True), "slow", "prod", seed=0)
    reference = budget.reference(oracle.chunked(**drawn.call()), **drawn.call())
    for seed in [None, *range(1, seeds + 1)]:
        memory = MemoryWatch()
        device.seed, device.watch = seed, Together(Races(), memory)
        call = drawn.call()
        for name, value in call.items():
            if isinstance(value, torch.Tensor):
                memory.protect(value, name)
        with memory.following(0xFF), torch.inference_mode():
            o, state = rung.chunk_kda(**call)
        wrong = [v.reason for v in budget.judge(o, state, reference) if not v.passed]
        bits = zlib.crc32(o.view(torch.int16).numpy().tobytes() + state.numpy().tobytes())
        print(json.dumps({"seed": seed, "found": device.watch.report(), "wrong": wrong, "bits": bits}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
