"""What a call costs on the host, with and without the call cache: `python -m ladder.call_cost [RUNG ...]` (needs a GPU).

Times the last stage of a rung (the CuTe kernel) at one chunk and one head, where the kernel itself is short, from the call until
Python goes on, without waiting for the device:

* cached: as the rung does it, a plan from the call cache and torch tensors handed to TVM-FFI;
* planned anew: the cache emptied before each call, so that the plan is made and the unit looked up again;
* re-marshalled: the cached plan, but every argument wrapped by `tvm_ffi.from_dlpack` in Python first;
* whole call: all stages of `chunk_kda`, contract included.

A line with the cost of one torch.empty comes first: hosts differ by a factor of two, and it tells by how much.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import torch

CALLS, ROUNDS = 200, 15


def microseconds(call: Callable[[], object]) -> float:
    """Median over rounds of the host time per call; the device is idle before each round."""
    for _ in range(20):
        call()
    rounds = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(CALLS):
            call()
        rounds.append((time.perf_counter() - began) / CALLS * 1e6)
    return statistics.median(rounds)


def costs(module, inputs) -> dict[str, float]:
    """Microseconds by name for a rung's module (its CALLS cache, STAGES and chunk_kda) and one set of inputs."""
    import tvm_ffi

    from ladder.cells import problem_of

    problem, x = problem_of(inputs), {**dict.fromkeys(("initial_state", "A_log", "dt_bias")), **inputs.tensors}
    for stage in module.STAGES[:-1]:
        x.update(stage.run(problem, x))
    last = module.STAGES[-1].run
    last(problem, x)
    *_, plan = module.CALLS._plans.values()
    arguments = []
    run = plan.run
    object.__setattr__(plan, "run", lambda *args: arguments.append(args))  # see what the stage hands over
    last(problem, x)
    object.__setattr__(plan, "run", run)

    def planned_anew():
        module.CALLS._plans.clear()
        last(problem, x)

    def remarshalled():
        plan.allocate(inputs.call()["q"])
        run(*(tvm_ffi.from_dlpack(a) if isinstance(a, torch.Tensor) else a for a in arguments[0]))

    call = inputs.call()
    return {
        "cached": microseconds(lambda: last(problem, x)), "planned anew": microseconds(planned_anew),
        "re-marshalled": microseconds(remarshalled), "whole call": microseconds(lambda: module.chunk_kda(**call)),
    }  # fmt: skip


def main(numbers: list[int]) -> None:
    from kernels.kda import inputs
    from kernels.kda.cases import Case
    from ladder import autotune, loader, manifest

    if not torch.cuda.is_available():
        sys.exit("call_cost: no GPU is visible here; accepted: a machine with one")
    autotune.use_recorded(torch.cuda.get_device_name())
    ladder = manifest.load()
    drawn = inputs.make(Case("one-chunk", 1, 64, 1, 1, 128, 128), "strong", "prod", seed=0, device="cuda")
    with torch.no_grad():
        print(f"torch.empty:  {microseconds(lambda: torch.empty((1, 64, 1, 128), dtype=torch.bfloat16, device='cuda')):.1f} us")
        for number in numbers:
            rung = ladder.rung(number)
            row = costs(loader.load(ladder.folder(rung)).module, drawn)
            print(rung.name + ":  " + ",  ".join(f"{name} {us:.1f} us" for name, us in row.items()))


if __name__ == "__main__":
    main([int(n) for n in sys.argv[1:]] or [2, 3, 4])
