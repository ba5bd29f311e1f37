"""`check`: every property of every rung asked for, each rung in a process of its own, judged by this one."""

from __future__ import annotations

import itertools
import multiprocessing.forkserver
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kernels.kda import hostile
from ladder import record as records
from ladder.build import starter
from ladder.cells import seed_for
from ladder.checks import ALL, GIVEN, NAMES, NOTES, ORACLE
from ladder.diff import DiffError, notes_mismatch
from ladder.judge import Judge
from ladder.manifest import Cell, Ladder, ManifestError, Rung
from ladder.worker import FAILED, NOT_RUN, PASSED, Assignment, Outcome, Task, Worker

PROBE_TOKENS = 128  # two chunks: the least that causality across chunks and halves need


@dataclass
class Options:
    """What to check. device: "auto", "cpu" or "cuda". archs, properties: names to keep, all if empty."""

    cases: Sequence[str] = ()
    regimes: Sequence[str] = ()
    forms: Sequence[str] = ()
    properties: Sequence[str] = ()
    archs: Sequence[str] = ()
    device: str = "auto"
    seed: int = 0
    time_limit_s: float = 600.0
    memory_limit: int = 48 << 30
    records_dir: Path | None = None
    hostile: Sequence[str] = ()  # hostile cases to run instead of everything else
    jobs: int = 2  # rungs checked at once, where they do not share a GPU


@dataclass
class Seat:
    """One rung on one architecture: its worker, or the reason why this machine has none for it."""

    rung: Rung
    arch: str
    kind: str | None
    reason: str = ""
    worker: Worker | None = None
    rows: list[dict[str, Any]] = field(default_factory=list)


class Run:
    """One `check` command. `rows` grows as properties are decided; `on_row` is told of each."""

    def __init__(self, ladder: Ladder, numbers: Iterable[int], options: Options, on_row: Any = lambda row: None) -> None:
        import torch

        self.ladder, self.options, self.on_row = ladder, options, on_row
        self.rungs = [ladder.rung(n) for n in dict.fromkeys(numbers)]
        if unknown := [p for p in options.properties if p not in NAMES]:
            raise ManifestError(f"properties: given {', '.join(unknown)}, accepted: {', '.join(NAMES)}")
        for text in options.hostile:
            try:
                hostile.make(text, 0)
            except hostile.SpecError as error:
                raise ManifestError(str(error)) from None
        if options.device == "cuda" and not torch.cuda.is_available():
            raise ManifestError("device: given cuda, but no GPU is visible; accepted: auto, cpu")
        self.cuda = torch.cuda.is_available() and options.device != "cpu"
        self._notes: list[dict[str, Any]] = []
        self._lock = threading.RLock()  # rows and records; the judge has one answer at a time
        self._cancelled = False
        self.paths: list[Path] = []
        self._records: dict[int, tuple[Path, dict[str, Any]]] = {}
        self.seats = [seat for rung in self.rungs for seat in self._seats(rung)]
        if not self.seats:
            raise ManifestError(f"archs: given {', '.join(options.archs)}, accepted: those that the rungs claim")

    def _seats(self, rung: Rung) -> list[Seat]:
        archs = [a for a in rung.archs if not self.options.archs or a in self.options.archs]
        return [Seat(rung, arch, *self._kind(arch)) for arch in archs]

    def _kind(self, arch: str) -> tuple[str | None, str]:
        """(how this machine runs that architecture, or None; why not)."""
        if arch == "cpu":
            return "native", ""
        if not self.cuda:
            return "emulated", ""
        import torch

        from ladder.timing import device_arch

        here = device_arch(torch.device("cuda", torch.cuda.current_device()))
        return ("cuda", "") if arch == here else (None, f"this machine's GPU is {here}; --device cpu emulates {arch}")

    def _cells(self, gpu: bool) -> list[Cell]:
        o = self.options
        return self.ladder.cells(gpu=gpu, cases=o.cases, regimes=o.regimes, forms=o.forms, every_regime=gpu)

    def _wanted(self, name: str) -> bool:
        return not self.options.hostile and (not self.options.properties or name in self.options.properties)

    @property
    def rows(self) -> list[dict[str, Any]]:
        """What has been decided so far, rung by rung."""
        return self._notes + [row for seat in self.seats for row in seat.rows]

    def tasks(self, seat: Seat) -> list[Task]:
        if self.options.hostile:
            return [Task(GIVEN, specs=tuple(self.options.hostile))]
        cells = self._cells(seat.kind == "cuda") if self._wanted(ORACLE) else []
        return [Task(ORACLE, cell) for cell in cells] + [Task(name) for name in ALL if self._wanted(name)]

    @property
    def steps(self) -> int:
        """Rows that `execute` will decide."""
        return sum(len(self.tasks(seat)) for seat in self.seats) + (len(self.rungs) if self._wanted(NOTES) else 0)

    def _columns(self) -> list[list[tuple[Seat, Task]]]:
        """Sequences that may run at once. On a GPU there is one, in which a cell goes round all rungs before the next,
        because its reference is large; elsewhere one per rung and architecture."""
        columns = [[(seat, task) for task in self.tasks(seat)] for seat in self.seats]
        if not self.cuda:
            return columns
        return [[pair for pairs in itertools.zip_longest(*columns) for pair in pairs if pair]]

    def execute(self) -> list[dict[str, Any]]:
        """Decide everything; every row is in its record before the next is begun."""
        import torch

        if any(seat.kind == "emulated" for seat in self.seats):
            starter()  # before a worker starts the server, for what it has imported serves them all
            multiprocessing.forkserver.ensure_running()
        judge = Judge(torch.device("cuda", torch.cuda.current_device()) if self.cuda else torch.device("cpu"))
        try:
            if self._wanted(NOTES):
                for rung in self.rungs:
                    self._keep(rung, self._notes, "-", Task(NOTES), _notes(self.ladder, rung))
            with ThreadPoolExecutor(self.options.jobs) as pool:
                running = [pool.submit(self._column, column, judge) for column in self._columns()]
                try:
                    for future in as_completed(running):
                        future.result()
                except BaseException:
                    self._cancel(running)
                    raise
            self._finish()
        finally:
            for seat in self.seats:
                if seat.worker:
                    seat.worker.stop()
            judge.close()
        return self.rows

    def _cancel(self, running: list[Future]) -> None:
        """Stop in the middle: what the stopped processes leave undecided is not a verdict."""
        self._cancelled = True
        for future in running:
            future.cancel()
        for seat in self.seats:
            if seat.worker:
                seat.worker.kill()

    def _column(self, column: list[tuple[Seat, Task]], judge: Judge) -> None:
        left = Counter(id(seat) for seat, _ in column)
        for seat, task in column:
            if self._cancelled:
                return
            outcome = self._decide(seat, task, judge)
            if self._cancelled:
                return
            self._keep(seat.rung, seat.rows, seat.arch, task, outcome)
            left[id(seat)] -= 1
            if not left[id(seat)] and seat.worker:
                seat.worker.stop()

    def _decide(self, seat: Seat, task: Task, judge: Judge) -> Outcome:
        if seat.kind is None:
            return Outcome(NOT_RUN, seat.reason)
        if seat.worker is None:
            probe = probe_cell(self._cells(seat.kind == "cuda"))
            assignment = Assignment(self.ladder.folder(seat.rung), seat.arch, seat.kind, self.options.seed, probe,
                                    judge.folder.name, seat.rung.replaces)  # fmt: skip
            seat.worker = Worker(assignment, self.options.time_limit_s, self.options.memory_limit)
            if self._cancelled:  # just now, when there was no worker to end
                seat.worker.kill()
        return seat.worker.run(task, self._judged(judge))

    def _judged(self, judge: Judge) -> Any:
        def answer(plea: Any) -> str | None:
            with self._lock:
                return judge.answer(plea)

        return answer

    def _keep(self, rung: Rung, rows: list[dict[str, Any]], arch: str, task: Task, outcome: Outcome) -> None:
        cell = task.cell
        row = {
            "rung": rung.number, "name": rung.name, "arch": arch, "property": task.property,
            "outcome": outcome.outcome, "reason": outcome.reason, "case": cell.case.name if cell else None,
            "regime": cell.regime if cell else None, "form": cell.form if cell else None, "seed": self.options.seed,
        }  # fmt: skip
        if outcome.cases:
            row["hostile"] = outcome.cases
        with self._lock:
            rows.append(row)
            self._file(rung, row)
            self.on_row(row)

    def _file(self, rung: Rung, row: dict[str, Any]) -> None:
        """Records are kept of GPU runs, and of others where a folder was named: a laptop's run is repeatable."""
        if (not self.cuda or self.options.hostile) and self.options.records_dir is None:
            return
        if rung.number not in self._records:
            folder = self.options.records_dir or self.ladder.folder(rung) / "records"
            record = records.new("check", self.ladder, rung, self._device(), seeds={"check": self.options.seed}, rows=[])
            path = records.create(records.path_for(folder, record), record)
            self._records[rung.number] = path, record
            self.paths.append(path)
        path, record = self._records[rung.number]
        record["rows"].append(row)
        records.write(path, record)

    def _finish(self) -> None:
        for path, record in self._records.values():
            record["complete"] = True
            records.write(path, record)

    def _device(self) -> dict[str, Any]:
        import platform

        import torch

        if self.cuda:
            from ladder.timing import describe_device

            return describe_device(torch.device("cuda", torch.cuda.current_device()))
        return {"name": f"emulated on {platform.machine()}", "arch": "cpu"}


def probe_cell(cells: Sequence[Cell]) -> Cell:
    """The smallest cell of at least two chunks (else the longest), with a long memory where there is the choice."""
    size = lambda c: c.case.B * c.case.T * c.case.HV * (c.case.K + c.case.V)  # noqa: E731
    prefer = {"slow": 0, "mixed": 1, "init": 2, "strong": 3}
    return min(cells, key=lambda c: (max(0, PROBE_TOKENS - c.case.T), size(c), prefer[c.regime], c.form != "prod"))


def _notes(ladder: Ladder, rung: Rung) -> Outcome:
    """Whether NOTES.md lists the files that really differ from the parent's."""
    try:
        wrong = notes_mismatch(rung.number, ladder.root)
    except (DiffError, OSError) as error:
        return Outcome(FAILED, str(error))
    return Outcome(FAILED, "; ".join(wrong)) if wrong else Outcome(PASSED)


def replay_seed(seed: int | None) -> int:
    """The given seed, or a fresh one."""
    if seed is not None:
        return seed
    from kernels.kda.inputs import fresh_seed

    return seed_for(fresh_seed(), "command")
