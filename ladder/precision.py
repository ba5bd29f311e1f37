"""`precision`: how far rungs and rivals are from fp64, all on the same inputs, cell by cell.

Two figures per tensor (o and the final state), both relative: the worst row as `check` measures it
(kernels.kda.budget.row_errors), and the L2 error of the whole tensor, |x - exact| / |exact|. The exact answer is the
judge's (ladder.judge). Without a GPU rungs and fla run in the emulator, at the small cases.
"""

from __future__ import annotations

import platform
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ladder import autotune, tamper, witness
from ladder import record as records
from ladder.cells import draw, problem_of, seed_for, shape_of
from ladder.judge import Judge
from ladder.loader import load
from ladder.manifest import Cell, Ladder, ManifestError, Rung

EMULATED = "sm_90a"  # what a machine without a GPU stands for
TENSORS = ("o", "final_state")
Outputs = tuple[torch.Tensor, torch.Tensor]


@dataclass
class Options:
    """rivals: measure them, too. records_dir: None for each rung's own folder on a GPU, for no record elsewhere."""

    cases: Sequence[str] = ()
    regimes: Sequence[str] = ()
    forms: Sequence[str] = ()
    rivals: bool = False
    seed: int = 0
    records_dir: Path | None = None


class Absent(Exception):
    """A rung or a rival has no error in this cell; the message says why."""


def relative_errors(x: torch.Tensor, exact: torch.Tensor) -> dict[str, float | None]:
    """worst_row and l2 of x against exact (fp64), see above; None where an element of x is not finite."""
    from kernels.kda.budget import row_errors

    if not torch.isfinite(x).all():
        return {"worst_row": None, "l2": None}
    scale = torch.linalg.vector_norm(exact).clamp_min(torch.finfo(exact.dtype).tiny)
    return {"worst_row": row_errors(x, exact).max().item(),
            "l2": (torch.linalg.vector_norm(x.to(exact.dtype) - exact) / scale).item()}  # fmt: skip


class Place:
    """The device of this process: its GPU, or (set up by `emulate`) the emulator. Rungs of arch "cpu" run as they are."""

    def __init__(self) -> None:
        self.emulator: Any = None
        if torch.cuda.is_available():
            from ladder.timing import describe_device

            self.device = torch.device("cuda", torch.cuda.current_device())
            self.about = describe_device(self.device)
            autotune.use_recorded(self.about["name"])
        else:
            self.device = torch.device("cpu")
            self.about = {"name": f"emulated on {platform.machine()}", "arch": "cpu"}

    def emulate(self) -> None:
        """For the rest of this process; before anything imports Triton's kernels."""
        from ladder.checks.context import NotRun
        from ladder.worker import emulate

        warnings.filterwarnings("ignore", message="TRITON_DEFAULT_FP_FUSION")
        try:
            self.emulator = emulate(EMULATED)
        except NotRun as reason:
            raise ManifestError(f"precision: {reason}") from None
        self.about["arch"] = EMULATED

    def refuses(self, rung: Rung) -> str | None:
        here = EMULATED if self.emulator else self.about["arch"]
        return None if here in rung.archs or "cpu" in rung.archs else f"written for {', '.join(rung.archs)}, here is {here}"

    def absent(self, rival: Any, inputs: Any) -> str | None:
        """Why a rival cannot run here, or None; fla's kernels are Triton's, which the emulator runs."""
        if self.emulator and rival.package == "fla":
            return rival.declines(inputs)
        return rival.absent(inputs)

    def run(self, call: Callable[[], Outputs], kernels: Sequence[str]) -> Outputs:
        """The call's outputs. Raises Absent where it did not launch all of `kernels` (parts of their names)."""
        outputs, launched = [], []
        before = len(self.emulator.stats) if self.emulator else 0
        with torch.no_grad():
            if kernels and self.device.type == "cuda":
                call()  # what tuning launches is not what the call launches
                try:
                    launched = witness.on_gpu(lambda: outputs.append(call()))
                except witness.BlindError:
                    pass
            else:
                outputs.append(call())
                launched = [launch["kernel"] for launch in self.emulator.stats[before:]] if self.emulator else []
        if launched and (lacking := witness.missing(kernels, launched)):
            raise Absent(f"another kernel ran: {', '.join(lacking)} expected, launched {', '.join(launched)[:200]}")
        return outputs[0]


class Run:
    """One `precision` command. `records` has one record per rung; `on_cell` is told of each finished cell."""

    def __init__(self, ladder: Ladder, numbers: Iterable[int], options: Options,
                 on_cell: Callable[[Cell], None] = lambda cell: None) -> None:  # fmt: skip
        self.ladder, self.options, self.on_cell = ladder, options, on_cell
        self.rungs = [ladder.rung(n) for n in dict.fromkeys(numbers)]
        self.place = Place()
        gpu = self.place.device.type == "cuda"
        self.cells = ladder.cells(gpu=gpu, cases=options.cases, regimes=options.regimes, forms=options.forms)
        if not gpu and any("cpu" not in rung.archs for rung in self.rungs):
            self.place.emulate()
        self._trusted = tamper.snapshot()
        self.records: list[dict[str, Any]] = []
        self.paths: dict[int, Path] = {}
        self.failures: list[str] = []

    def execute(self) -> None:
        """Measure every cell; each is in its records before the next is begun."""
        self.records = [
            records.new("precision", self.ladder, rung, self.place.about, seeds={"precision": self.options.seed}, precision=[])
            for rung in self.rungs]  # fmt: skip
        judge = Judge(self.place.device)
        try:
            for cell in self.cells:
                self._cell(cell, judge)
                self.on_cell(cell)
        finally:
            judge.close()
        for rung, record in zip(self.rungs, self.records):
            record["complete"] = True
            self._keep(rung, record)

    def _cell(self, cell: Cell, judge: Judge) -> None:
        from kernels.kda import rivals

        seed = seed_for(self.options.seed, *cell.key, "precision")
        inputs, reference = draw(cell, seed, self.place.device), judge.reference(*cell, seed)
        shared: dict[str, Any] = {"errors": {}, "absent": {}}
        for rival in rivals.ALL if self.options.rivals else ():
            self._measure(shared, rival.name, partial(self._rival, rival), inputs, reference)
        for rung, record in zip(self.rungs, self.records):
            own = {kind: dict(found) for kind, found in shared.items()}
            self._measure(own, "rung", partial(self._rung, rung), inputs, reference, f"{rung.name} {cell}")
            record["precision"].append({
                "case": cell.case.name, "regime": cell.regime, "form": cell.form, "seed": seed, "shape": shape_of(cell),
                "budgets": {t: None if reference.void else reference.budgets[t] for t in TENSORS}, "void": reference.void,
                **own})  # fmt: skip
            self._keep(rung, record)

    def _keep(self, rung: Rung, record: dict[str, Any]) -> None:
        """On a GPU, or where a folder was named: as `check` does."""
        if self.options.records_dir is None and self.place.device.type != "cuda":
            return
        folder = self.options.records_dir or self.ladder.folder(rung) / "records"
        if rung.number not in self.paths:
            self.paths[rung.number] = records.create(records.path_for(folder, record), record)
        else:
            records.write(self.paths[rung.number], record)

    def _measure(self, into: dict[str, Any], name: str, run: Callable[[Any], Outputs], inputs: Any, reference: Any,
                 failure: str = "") -> None:  # fmt: skip
        """Put the errors of one callee into `into`, or why it has none: whatever it raises is its own row.

        failure: where to say that it failed rather than declined, if that counts."""
        try:
            outputs = run(inputs.clone())
            for t, x, exact in zip(TENSORS, outputs, (reference.o, reference.state)):
                if x is None or x.shape != exact.shape:
                    raise ValueError(f"{t}: returned {None if x is None else tuple(x.shape)}, accepted: {tuple(exact.shape)}")
            found = {t: relative_errors(x, exact) for t, x, exact in zip(TENSORS, outputs, (reference.o, reference.state))}
            if complaint := tamper.complaint(self._trusted):
                raise RuntimeError(f"no error counts here: a callee {complaint}")
            into["errors"][name] = found
        except Absent as reason:
            into["absent"][name] = str(reason)
        except Exception as error:
            into["absent"][name] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            if failure:
                self.failures.append(f"{failure}: {into['absent'][name]}")

    def _rival(self, rival: Any, inputs: Any) -> Outputs:
        if reason := self.place.absent(rival, inputs):
            raise Absent(reason)
        return self.place.run(rival.prepare(inputs), rival.kernels)

    def _rung(self, rung: Rung, inputs: Any) -> Outputs:
        if reason := self.place.refuses(rung):
            raise Absent(reason)
        loaded = load(self.ladder.folder(rung))
        if reason := loaded.unsupported(problem_of(inputs)):
            raise Absent(f"the rung declines it: {reason}")
        return self.place.run(partial(loaded.chunk_kda, **inputs.call()), ())
