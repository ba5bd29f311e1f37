"""`bench`: rungs, their parents, A/A copies of the parents and rivals, interleaved in random order in every round.

All rungs asked for share the rounds: where rung 3 is timed and rung 4's parent is rung 3, the same time serves as both.
The control is one more, separately imported copy of the parent, so that its ratio to the parent shows what this
machine's noise is worth. A cell is in its records before the next is begun.
"""

from __future__ import annotations

import contextlib
import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ladder import autotune, tamper, witness
from ladder import record as records
from ladder.cells import draw, floor_ms, problem_of, seed_for, shape_of
from ladder.loader import LoadedRung, load
from ladder.manifest import Cell, Ladder, ManifestError, Rung
from ladder.telemetry import Telemetry
from ladder.timing import CaptureError, CudaTimer, ReplayError, outputs_of, worst_row

MIN_ROUNDS, MAX_ROUNDS = 15, 41
EAGER_ROUNDS = 7
SETS = 3  # input sets, taken in turn
AGREE = 0.1  # worst row by which two callees may differ: several times what the error budget lets two right ones differ
SYNC_MS = 0.05  # what waiting for the device may add to a call


@dataclass
class Options:
    """seconds: time for a cell's rounds beyond MIN_ROUNDS; records_dir: None for each rung's own folder."""

    cases: Sequence[str] = ()
    regimes: Sequence[str] = ()
    forms: Sequence[str] = ()
    rivals: bool = False
    stages: bool = False
    seconds: float = 2.0
    seed: int = 0
    records_dir: Path | None = None


class CalleeError(RuntimeError):
    """A callee cannot be timed in this cell; the message says why."""


@dataclass
class Callee:
    """Anything timed: an instance of a rung, or a rival.

    prepare(inputs) gives a call without arguments. unsupported(inputs) says why it cannot, or None. kernels: substrings
    of which each must be among the launched kernels' names.
    """

    name: str
    prepare: Callable[[Any], Callable[[], Any]]
    unsupported: Callable[[Any], str | None]
    kernels: tuple[str, ...] = ()
    must_agree: bool = True
    # for one cell:
    calls: list[Callable[[], Any]] = field(default_factory=list)
    replays: list[Callable[[], Any]] = field(default_factory=list)
    why_eager: str = ""
    launched: list[str] = field(default_factory=list)
    samples: list[float] = field(default_factory=list)
    eager: list[float] = field(default_factory=list)
    stages: dict[str, list[float]] = field(default_factory=dict)
    error: str = ""

    @property
    def clock(self) -> str:
        return "graph" if self.replays else "events"

    def reset(self) -> None:
        for name in ("calls", "replays", "launched", "samples", "eager"):
            setattr(self, name, [])
        self.stages, self.why_eager, self.error = {}, "", ""


@dataclass(frozen=True)
class Roles:
    """Which callees stand for a rung, its parent and the control."""

    rung: Rung
    subject: Callee
    parent: Callee
    control: Callee


def cuda_timer() -> CudaTimer:
    """A timer for the current GPU. Raises ManifestError where there is none."""
    if not torch.cuda.is_available():
        raise ManifestError("bench: no GPU is visible here; accepted: a machine with one (check runs without)")
    autotune.use_recorded(torch.cuda.get_device_name())
    return CudaTimer(torch.device("cuda", torch.cuda.current_device()))


class Run:
    """One `bench` command on one device. `on_cell` is told of each finished cell."""

    def __init__(self, ladder: Ladder, numbers: Iterable[int], options: Options, timer: Any, gpu_cases: bool = True,
                 on_cell: Callable[[Cell, str], None] = lambda cell, note: None) -> None:  # fmt: skip
        self.ladder, self.options, self.timer, self.on_cell = ladder, options, timer, on_cell
        self.rungs = [ladder.rung(n) for n in dict.fromkeys(numbers)]
        self.cells = ladder.cells(gpu=gpu_cases, cases=options.cases, regimes=options.regimes, forms=options.forms)
        self.random = random.Random(options.seed)
        self.records: list[dict[str, Any]] = []
        self.paths: list[Path] = []
        self.failures: list[str] = []
        self._trusted = tamper.snapshot()
        self._instances: dict[tuple[int, int], Callee] = {}
        self._loaded: dict[str, LoadedRung] = {}
        self.roles = [self._cast(rung) for rung in self.rungs]
        self.callees = list(self._instances.values()) + (self._rivals() if options.rivals else [])

    def _cast(self, rung: Rung) -> Roles:
        """Instances: a rung is its own instance 0; as a parent it is the same one, unless it is its own parent."""
        parent = self.ladder.parent(rung)
        first = 1 if parent.number == rung.number else 0
        return Roles(rung, self._instance(rung, 0), self._instance(parent, first), self._instance(parent, first + 1))

    def _instance(self, rung: Rung, instance: int) -> Callee:
        key = (rung.number, instance)
        if key not in self._instances:
            loaded = load(self.ladder.folder(rung), instance)
            name = f"{rung.name}#{instance}"
            self._loaded[name] = loaded
            self._instances[key] = Callee(
                name, lambda inputs: partial(loaded.chunk_kda, **inputs.call()),
                lambda inputs: loaded.unsupported(problem_of(inputs)))  # fmt: skip
        return self._instances[key]

    def _rivals(self) -> list[Callee]:
        from kernels.kda import rivals

        return [Callee(r.name, r.prepare, r.absent, r.kernels, must_agree=False) for r in rivals.ALL]

    def execute(self) -> None:
        """Time every cell; a record per rung, complete after the last cell and readable after each."""
        copy_gbps = self.timer.copy_gbps()
        device = self.timer.describe()
        for role in self.roles:
            record = records.new("bench", self.ladder, role.rung, device, copy_gbps=copy_gbps,
                                 seeds={"bench": self.options.seed}, cells=[], failed=[])  # fmt: skip
            self.records.append(record)
            folder = self.options.records_dir or self.ladder.folder(role.rung) / "records"
            self.paths.append(records.path_for(folder, record))
        for cell in self.cells:
            began = time.monotonic()
            with torch.no_grad():
                rounds = self._cell(cell)
            self._file(cell, copy_gbps)
            for callee in self.callees:
                callee.reset()
            self.timer.release()
            self.on_cell(cell, f"{rounds} rounds, {time.monotonic() - began:.1f} s")
        for path, record in zip(self.paths, self.records):
            record["complete"] = True
            if record["cells"]:
                records.write(path, record)

    def _cell(self, cell: Cell) -> int:
        """Fill every callee's samples for one cell; returns the number of rounds."""
        sets = [draw(cell, seed_for(self.options.seed, *cell.key, i), self.timer.device) for i in range(SETS)]
        expected: list[list[torch.Tensor]] = []
        first_set = sets[0].clone()
        for callee in self.callees:
            try:
                self._prepare(callee, sets, expected)
                if callee.must_agree:
                    self._remembers_nothing(callee, sets, first_set, expected[1])
            except CalleeError as error:
                callee.error = str(error)
            except Exception as error:  # a callee's failure is its own row, not the run's end
                callee.error = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        ready = [c for c in self.callees if not c.error]
        with Telemetry(self.timer.device.index or 0) as self.telemetry:
            rounds = self._rounds(ready) if ready else 0
        for callee in ready:
            if callee.must_agree:
                callee.error = escaped_work(callee) or self._late_memory(callee, sets, first_set, expected)
        if ready and (complaint := tamper.complaint(self._trusted)):
            for callee in ready:
                callee.error = f"no time counts here: a callee {complaint}"
        if self.options.stages:
            for role in self.roles:
                if role.subject in ready:
                    role.subject.stages = self._stages(self._loaded[role.subject.name], sets[0])
        return rounds

    def _prepare(self, callee: Callee, sets: Sequence[Any], expected: list[list[torch.Tensor]]) -> None:
        """Compile and tune, compare with the first callee's outputs on every input set, capture, and see what launched."""
        if reason := callee.unsupported(sets[0]):
            raise CalleeError(reason)
        callee.calls = [callee.prepare(inputs) for inputs in sets]
        for i, call in enumerate(callee.calls):
            outputs = outputs_of(call())
            if len(expected) <= i:
                expected.append([t.clone() for t in outputs])
            elif (difference := worst_row(outputs, expected[i])) > AGREE and callee.must_agree:
                raise CalleeError(f"its answer is not that of the others: a row differs by {difference:.2g} (input set {i})")
        callee.launched = self.timer.launched(callee.calls[0])
        if callee.kernels and callee.launched and (absent := witness.missing(callee.kernels, callee.launched)):
            raise CalleeError(f"another kernel ran: {', '.join(absent)} expected, launched {', '.join(callee.launched)[:200]}")
        try:
            callee.replays = [self.timer.capture(call) for call in callee.calls]
        except ReplayError as error:
            if callee.must_agree:
                raise CalleeError(str(error)) from None
            callee.replays, callee.why_eager = [], str(error)
        except CaptureError as error:
            callee.replays, callee.why_eager = [], str(error)

    def _remembers_nothing(self, callee: Callee, sets: Sequence[Any], first_set: Any, other: list[torch.Tensor]) -> None:
        """New values at known addresses give the new answer; else repeated rounds would time a cache."""
        tensors = sets[0].tensors
        try:
            for name, t in tensors.items():
                t.copy_(sets[1].tensors[name])
            if (difference := worst_row(outputs_of(callee.calls[0]()), other)) > AGREE:
                raise CalleeError(f"new values in the same input tensors give an old answer: a row differs by {difference:.2g}")
        finally:
            for name, t in tensors.items():
                t.copy_(first_set.tensors[name])

    def _late_memory(self, callee: Callee, sets: Sequence[Any], first_set: Any, expected: list[list[torch.Tensor]]) -> str:
        """What a callee has begun to remember while it was timed, or ""."""
        try:
            self._remembers_nothing(callee, sets, first_set, expected[1])
        except CalleeError as error:
            return f"after the rounds, {error}"
        return ""

    def _rounds(self, callees: list[Callee]) -> int:
        """Device time, then eager wall time, of all callees in every round, each round in a new random order."""
        began, n = time.monotonic(), 0
        self._round(callees, 0, lambda c, i: self.timer.device_ms((c.replays or c.calls)[i]), None)  # clocks up, unrecorded
        while n < MIN_ROUNDS or (n < MAX_ROUNDS and time.monotonic() - began < self.options.seconds):
            self._round(callees, n, lambda c, i: self.timer.device_ms((c.replays or c.calls)[i]), "samples")
            n += 1
        for k in range(EAGER_ROUNDS):
            self._round(callees, k, lambda c, i: self.timer.wall_ms(c.calls[i]), "eager")
        return n

    def _round(self, callees: list[Callee], n: int, measure: Callable[[Callee, int], float], into: str | None) -> None:
        for callee in self.random.sample(callees, len(callees)):
            ms = measure(callee, n % SETS)
            if into:
                getattr(callee, into).append(ms)

    def _stages(self, loaded: LoadedRung, inputs: Any) -> dict[str, list[float]]:
        """Milliseconds per stage, one at a time, on what the stages before it left."""
        problem = problem_of(inputs)
        x = {name: inputs.tensors.get(name) for name in
             ("q", "k", "v", "g", "beta", "initial_state", "A_log", "dt_bias")}  # fmt: skip
        out = {}
        for stage in loaded.stages:
            run = partial(stage.run, problem, dict(x))
            new = run()
            before = {t.untyped_storage().data_ptr() for t in x.values() if isinstance(t, torch.Tensor)}
            x.update(new)
            fresh = [n for n, t in new.items() if isinstance(t, torch.Tensor) and t.untyped_storage().data_ptr() not in before]
            timed = run
            if fresh:  # a capture poisons what it is shown: never a tensor that the stage merely passes on
                with contextlib.suppress(CaptureError):
                    timed = self.timer.capture(lambda: [result[n] for result in (run(),) for n in fresh])
            out[stage.name] = [self.timer.device_ms(timed) for _ in range(MIN_ROUNDS)]
        return out

    def _file(self, cell: Cell, copy_gbps: float) -> None:
        """Write the cell into every rung's record, or why it could not be timed."""
        for n, (role, record, path) in enumerate(zip(self.roles, self.records, self.paths)):
            named = {"rung": role.subject, "parent": role.parent, "control": role.control}
            if errors := [f"{who}: {c.error}" for who, c in named.items() if c.error]:
                record["failed"].append({"case": cell.case.name, "regime": cell.regime, "form": cell.form, "reason": errors[0]})
                self.failures.append(f"{role.rung.name} {cell}: {errors[0]}")
                continue
            named |= {c.name: c for c in self.callees if not c.must_agree and not c.error}
            record["cells"].append(self._cell_record(cell, named, floor_ms(cell, copy_gbps)))
            if len(record["cells"]) == 1:
                self.paths[n] = records.create(path, record)
            else:
                records.write(path, record)

    def _cell_record(self, cell: Cell, named: dict[str, Callee], floor: float) -> dict[str, Any]:
        case, subject = cell.case, named["rung"]
        medians = {stage: sorted(ms)[len(ms) // 2] for stage, ms in subject.stages.items()}
        return {
            "case": case.name, "regime": cell.regime, "form": cell.form,
            "shape": shape_of(cell),
            "seed": seed_for(self.options.seed, *cell.key, 0), "floor_ms": floor, "clock": subject.clock,
            "samples_ms": {n: c.samples for n, c in named.items()}, "eager_ms": {n: c.eager for n, c in named.items()},
            "clocks": {n: c.clock for n, c in named.items()},
            "not_captured": {n: c.why_eager for n, c in named.items() if c.why_eager},
            "launches": {n: c.launched for n, c in named.items()},
            "absent": {c.name: c.error for c in self.callees if not c.must_agree and c.error},
            "telemetry": self.telemetry.summary(), "stages_ms": medians, "stages_samples_ms": subject.stages,
        }  # fmt: skip


def escaped_work(callee: Callee) -> str | None:
    """Whether a callee timed by events keeps the device busy long after them: then its work is on another stream."""
    if callee.clock != "events" or not callee.eager:
        return None
    inside, until_idle = statistics.median(callee.samples), statistics.median(callee.eager)
    if until_idle - inside > SYNC_MS + 0.5 * until_idle:
        return f"work escapes the events: {inside:.3f} ms between them, {until_idle:.3f} ms until the device is idle"
    return None
