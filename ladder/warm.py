"""Fill Triton's cache on a GPU before anything is timed: `python -m ladder.warm [RUNG ...]`.

On a cold machine Triton compiles each kernel when it is first called, one after another, for minutes. Here every case and gate
kind has a process of its own, which calls each rung and each rival once in both forms; `bench` and `check` then find what they need.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed

from ladder import manifest
from ladder.cells import draw, problem_of
from ladder.manifest import FORMS, Cell, Ladder

GATES = ("strong", "init")  # safe gate and softplus gate: what a kernel is compiled for does not depend on values


def groups(ladder: Ladder) -> list[list[Cell]]:
    """What one process calls: the two forms of a GPU case under one kind of gate."""
    cells = ladder.cells(gpu=True, regimes=GATES, every_regime=True)
    return [[c for c in cells if (c.case, c.regime) == key] for key in dict.fromkeys((c.case, c.regime) for c in cells)]


def call_all(ladder: Ladder, numbers: Sequence[int], cells: Iterable[Cell], device: str = "cuda") -> list[str]:
    """Call each rung and rival once per cell; one line for each that fails, which is not this command's business to judge."""
    import torch

    from kernels.kda import rivals
    from ladder import autotune, loader

    if device == "cuda":
        autotune.use_recorded(torch.cuda.get_device_name())
    rungs = [loader.load(ladder.folder(ladder.rung(n))) for n in numbers]
    failed = []
    for cell in cells:
        inputs = draw(cell, 0, device)
        calls = [(r.name, lambda r=r: None if r.unsupported(problem_of(inputs)) else r.chunk_kda(**inputs.call())) for r in rungs]
        calls += [(r.name, lambda r=r: None if r.absent(inputs) else r.prepare(inputs)()) for r in rivals.ALL]
        for name, call in calls:
            try:
                with torch.no_grad():
                    call()
            except Exception as error:  # named here, judged by check and bench
                failed.append(f"{name} {cell}: {type(error).__name__}: {' '.join(str(error).split())[:160]}")
    return failed


def main(numbers: list[int]) -> int:
    import torch

    if not torch.cuda.is_available():
        sys.exit("warm: no GPU is visible here; accepted: a machine with one")
    ladder, began = manifest.load(), time.monotonic()
    numbers = ladder.numbers(numbers)
    work, lines = groups(ladder), []
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(len(work), os.cpu_count() or 1), mp_context=context) as pool:
        for done in as_completed([pool.submit(call_all, ladder, numbers, cells) for cells in work]):
            lines += done.result()
    print("\n".join([*lines, f"{len(work)} groups of {len(FORMS)} cells, {time.monotonic() - began:.0f} s"]))
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main([int(n) for n in sys.argv[1:]]))
