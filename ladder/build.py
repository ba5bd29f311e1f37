"""`build`: compile rungs for every architecture they claim, with or without a GPU, and read what their kernels take.

CuTe units are compiled for the head dimensions and dtype of the ladder's first GPU case. Triton kernels are compiled by
calling the rung on small tensors of the same head dimensions, with a Triton driver that launches nothing. What was read
is kept in .build/ for as long as the rung's code, the recorded choices and the toolchain stay what they are.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import multiprocessing
import warnings
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from ladder import autotune
from ladder.files import replace_text
from ladder.manifest import Cell, Ladder, Rung

JOBS = 2
PRELOAD = ["torch", "torch._inductor.compile_fx", "triton"]  # what torch.compile takes, which fla's modules import, and Triton
GATES = (("prod", "strong"), ("prod", "init"), ("pre", "strong"), ("pre", "init"))  # every gate path of every form

Seat = tuple[Rung, str]


def seats(ladder: Ladder, numbers: Iterable[int]) -> list[Seat]:
    """Every (rung, architecture) to compile; plain torch rungs have nothing to compile."""
    return [(rung, arch) for n in numbers for rung in (ladder.rung(n),) for arch in rung.archs if arch != "cpu"]


def compiled(ladder: Ladder, wanted: list[Seat]) -> Iterator[tuple[Seat, list[dict[str, Any]]]]:
    """Each seat as it is done, with one row per kernel: rung, name, arch, kernel, registers, spilled (bytes per thread),
    shared (bytes per CTA), error; one row with an error where it does not compile."""
    cell = ladder.cells(gpu=True)[0]
    cell = cell._replace(case=replace(cell.case, B=1, T=64, H=1, HV=1))
    left = []
    for rung, arch in wanted:
        place = _place(ladder.folder(rung), arch, cell)
        if place.is_file():
            yield (rung, arch), json.loads(place.read_text())
        else:
            left.append((rung, arch, place))
    with ProcessPoolExecutor(JOBS, mp_context=starter(), max_tasks_per_child=1) as pool:
        jobs = {pool.submit(_compile, ladder.folder(rung), arch, cell): (rung, arch, place) for rung, arch, place in left}
        for job in as_completed(jobs):
            rung, arch, place = jobs[job]
            base = {"rung": rung.number, "name": rung.name, "arch": arch, "error": ""}
            empty = {"kernel": None, "registers": None, "spilled": None, "shared": None}
            try:
                rows = [{**base, **row} for row in job.result()]
                replace_text(place, json.dumps(rows))
            except Exception as error:  # whatever the rung's build raised, or the death of its process
                rows = [{**base, **empty, "error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}]
            yield (rung, arch), rows


def starter() -> Any:
    """The multiprocessing context of processes that run a rung's code: each is fresh but for the libraries that all need."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


def _place(folder: Path, arch: str, cell: Cell) -> Path:
    """Where the rows of a rung are kept: a name made of everything that decides them."""
    from _common.cute import BUILD

    digest = hashlib.sha256(repr((_code(folder), arch, cell)).encode()).hexdigest()[:20]
    return BUILD / f"rows-{folder.name}-{arch}-{digest}.json"


@cache
def _code(folder: Path) -> str:
    """A hash of the rung's code, of this file and what it reads cubins with, of the recorded choices and the toolchain."""
    from _common.codehash import ROOT, file_hash
    from _common.cute import toolchain

    versions = toolchain() | {name: importlib.metadata.version(name) for name in ("torch", "triton", "fla-core")}
    choices = [(p.name, p.read_text()) for p in sorted(autotune.FOLDER.rglob("*.json"))]
    entries = [*folder.glob("*.py"), Path(__file__), ROOT / "emulator" / "triton_driver.py", ROOT / "_common" / "resources.py"]
    return file_hash(entries, folder.name, repr(choices), repr(versions))


def _compile(folder: Path, arch: str, cell: Cell) -> list[dict[str, Any]]:
    """Runs in a process of its own: the Triton driver is per process."""
    from ladder.loader import load

    from emulator import triton_driver

    warnings.filterwarnings("ignore", message="TRITON_DEFAULT_FP_FUSION")
    autotune.use_recorded(triton_driver.DEVICES[arch][1])
    device = triton_driver.activate(arch)
    device.launch = lambda *args, **kw: None  # compiled, not run
    rung = load(folder)
    rows = _units(rung, arch, cell.case)
    _call_triton_stages(rung, arch, cell)
    return rows + _triton_kernels()


def _units(rung: Any, arch: str, case: Any) -> list[dict[str, Any]]:
    """Of the units' templates, those for the case's head dimensions and dtype."""
    from _common.cute import compile_unit
    from _common.resources import resources

    given = {"K": case.K, "V": case.V, "dtype": case.dtype}
    units = [template(arch) for template in rung.units]
    units = [u for u in units if all(given.get(name, value) == value for name, value in u.params)]
    return [_row(r, r.shared) for unit in units for r in resources(compile_unit(unit).cubin)]


class Idle:
    """A target whose units do nothing. units: those that were asked for, each once, in order."""

    def __init__(self, arch: str) -> None:
        self.arch = arch
        self.units: dict[Any, None] = {}

    def load(self, unit: Any) -> Any:
        self.units[unit] = None
        return lambda *args: None


def _call_triton_stages(rung: Any, arch: str, cell: Cell) -> None:
    import torch

    from _common import target
    from ladder.cells import draw, problem_of

    with target.use(Idle(arch)), torch.no_grad():
        for form, regime in GATES:
            inputs = draw(cell._replace(form=form, regime=regime), 0, torch.device("cpu"))
            if not rung.unsupported(problem_of(inputs)):
                rung.chunk_kda(**inputs.call())


def _triton_kernels() -> list[dict[str, Any]]:
    import gc

    from triton.runtime import JITFunction

    from _common.resources import resources

    rows = {}
    for function in [o for o in gc.get_objects() if type(o) is JITFunction]:
        for kernels, *_ in function.device_caches.values():
            for kernel in kernels.values():
                for r in resources(kernel.asm["cubin"]):
                    row = _row(r, max(r.shared, kernel.metadata.shared))
                    rows[tuple(row.values())] = row
    return list(rows.values())


def _row(r: Any, shared: int) -> dict[str, Any]:
    return {"kernel": r.kernel, "registers": r.registers, "spilled": r.spilled, "shared": shared}
