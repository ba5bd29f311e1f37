"""Which compiled units a rung loads when a GPU checks and benches it, or captures what the emulator is compared with.

The rung is called with the shapes, dtypes and flags of everything that `check`, `bench` and a capture call it with there, on a
target that notes what is loaded and runs nothing. No list of units has to be kept by hand, and a GPU box that cannot compile
lacks none.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from _common.cute import Unit
from ladder.build import Idle
from ladder.cells import draw
from ladder.manifest import FORMS, Cell, Ladder, Rung


def units(ladder: Ladder, rung: Rung, arch: str) -> list[Unit]:
    """The units, in the order in which they are first asked for."""
    from ladder.check import probe_cell

    cells = ladder.cells(gpu=True, every_regime=True)
    context = multiprocessing.get_context("forkserver")  # a process of its own, for Triton's launches are switched off in it
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        captured = ladder.cells(gpu=False)  # tests/hardware/capture.py
        return pool.submit(_asked, ladder.folder(rung), arch, cells + captured, probe_cell(cells)).result()


def _asked(folder: Path, arch: str, cells: list[Cell], probe: Cell) -> list[Unit]:
    import torch
    from triton.runtime.jit import KernelInterface

    from _common import target
    from kernels.kda.contract import ContractError, Unsupported
    from ladder.loader import load

    KernelInterface.__getitem__ = lambda kernel, grid: lambda *args, **options: None
    idle = Idle(arch)
    with target.use(idle), torch.no_grad():
        rung = load(folder)
        for call in _calls(cells, probe):
            try:
                rung.chunk_kda(**call)
            except (ContractError, Unsupported):
                continue
    return list(idle.units)


def _calls(cells: list[Cell], probe: Cell) -> Iterator[dict[str, Any]]:
    """Arguments of every kind of call. The large tensors are never written, so that they take no memory."""
    import torch

    from kernels.kda import hostile
    from kernels.kda.inputs import REGIMES
    from ladder.checks.hostile import CUTS, part

    kinds = [(dtype, state, form, regime) for dtype in ("bfloat16", "float16") for state in (False, True)
             for form in FORMS for regime in REGIMES]  # fmt: skip
    tokens = (1, 64, 250, probe.case.T // 2, probe.case.T, probe.case.T + 64)
    varied = [replace(probe.case, T=T) for T in tokens] + [replace(probe.case, B=probe.case.B + 1)]
    for cell in cells + [Cell(replace(case, dtype=dtype, initial_state=state), regime, form)
                         for case in varied for dtype, state, form, regime in kinds]:  # fmt: skip
        yield _blank(cell)
    for core, more in hostile.FAMILIES.values():
        for text in core + more:
            inputs, c = hostile.make(text, 0), hostile.parse(text).case
            yield inputs.call()
            for cut in CUTS if hostile.parse(text).cut == "all" else ():
                if cut < c.T:
                    yield part(inputs, slice(0, cut)).call()
                    yield part(inputs, slice(cut, c.T), torch.empty(c.B, c.HV, c.K, c.V)).call()


def _blank(cell: Cell) -> dict[str, Any]:
    """The cell's call with memory that nothing was written to."""
    import torch

    from kernels.kda.contract import shapes

    case = cell.case
    small = draw(cell._replace(case=replace(case, B=1, T=1, H=1, HV=1)), 0, "cpu").call()
    full = shapes(case.B, case.T, case.H, case.HV, case.K, case.V)
    return {name: torch.empty(full[name], dtype=t.dtype) if isinstance(t, torch.Tensor) else t for name, t in small.items()}
