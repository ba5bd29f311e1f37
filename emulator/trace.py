"""A watcher that writes down who did what when in one CTA of each launch. Time is scheduler steps of that CTA: one step is
one instruction of one fragment, so what overlaps on hardware stands one after another here. It is an order, not a time."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from .roles import roles, source_text
from .watch import Watch

WAITS = ("mbarrier", "barrier", "own work")
STEPS = "scheduler steps (an order, not a time)"


@dataclass
class Span:
    """Steps [start, end) of a warp (running or waiting) or of an asynchronous operation (issue to completion)."""

    start: int
    end: int
    kind: str
    what: str
    where: str = ""
    warp: int = -1  # who waits, runs or issued


@dataclass
class Launch:
    """One launch: spans of the CTA's warps, of its asynchronous operations by queue, and single events (a Span of no
    length)."""

    kernel: str
    grid: tuple
    cta: str
    warps: int
    steps: int = 0
    runs: list = field(default_factory=list)
    waits: list = field(default_factory=list)
    operations: list = field(default_factory=list)
    events: list = field(default_factory=list)
    roles: list = field(default_factory=list)

    def role(self, warp):
        return next((r for r in self.roles if r.first <= warp <= r.last), None)

    @property
    def telling(self):
        """Whether warps differ in what they do, or work goes on in the background."""
        return len(self.roles) > 1 or bool(self.operations)


class Trace(Watch):
    """launches: a Launch per kernel run. cta: linear index of the CTA to follow, the last one of a smaller grid."""

    counts_warps = True

    def __init__(self, cta=0):
        self.cta, self.launches = cta, []

    def launch(self, machine):
        self.now = None

    def batch_begin(self, machine, first_cta, ctas):
        wanted = min(self.cta, machine.ctas - 1)
        self.local = wanted - first_cta if first_cta <= wanted < first_cta + ctas else None
        if self.local is None:
            return
        self.now = Launch(machine.kernel.name, machine.grid, machine.cta_name(self.local), machine.warps_per_cta)
        self.launches.append(self.now)
        self.clock, self.began, self.running = 0, machine.step, []
        self.waiting, self.flying = {}, {}

    def batch_end(self, machine):
        if self.local is None:
            return
        self._close(machine)
        self.now.steps = self.clock
        n = machine.warps_per_cta
        self.now.roles = roles(machine.kernel.code, machine.by_warp[:, self.local * n : self.local * n + n])
        self.local = None

    def _step(self, machine):
        return self.clock + (machine.step - self.began if self.running else 0)

    def _warps(self, machine, f):
        if self.local is None or f is None:
            return []
        n = machine.warps_per_cta
        return [w - self.local * n for w in f.warps.tolist() if w // n == self.local]

    def _close(self, machine):
        """The turn that was going on has ended."""
        end = self._step(machine)
        for w in self.running:
            last = self.now.runs[-1] if self.now.runs else None
            if end > self.clock:
                if last and last.warp == w and last.end == self.clock:
                    last.end = end
                else:
                    self.now.runs.append(Span(self.clock, end, "run", "runs", warp=w))
        self.clock, self.running = end, []

    def turn(self, machine, f):
        if self.local is None:
            return
        self._close(machine)
        self.running, self.began = self._warps(machine, f), machine.step
        for w in self.running:
            self._woken(w, self.clock)

    def _woken(self, w, step):
        span = self.waiting.pop(w, None)
        if span is None:
            return
        span.end = step
        if step > span.start:
            self.now.waits.append(span)

    def wait_begin(self, machine, f, wait):
        step = self._step(machine)
        for w in self._warps(machine, f):
            kind = {"mbarrier": "mbarrier", "bar": "barrier", "barrier": "barrier"}.get(machine.kernel.code[f.pc].parts[0], "own work")
            what = wait.describe(f).partition(": ")[0].partition(" (")[0]
            self.waiting.setdefault(w, Span(step, step, kind, what, source_text(machine.kernel.code[f.pc]), w))

    def wait_end(self, machine, f):
        for w in self._warps(machine, f):
            self._woken(w, self._step(machine))

    # ---- events ------------------------------------------------------------------------------------------------------

    def _event(self, machine, f, ins, kind, what):
        for w in self._warps(machine, f):
            step = self._step(machine)
            self.now.events.append(Span(step, step, kind, what, source_text(ins), w))

    def barrier(self, machine, f, ins, action, ids, counts):
        self._event(machine, f, ins, "barrier", f"barrier {int(ids[0])} {action}")

    def mbarrier(self, machine, f, ins, event, cta, offset, detail):
        if cta == self.local and event in ("arrive", "init") and f is not None:
            extra = f" expecting {detail} bytes" if detail else ""
            self._event(machine, f, ins, event, f"mbarrier 0x{offset:x} {event}{extra}")

    def fence(self, machine, f, ins, modifiers):
        self._event(machine, f, ins, "fence", ".".join(ins.parts))

    def wait_done(self, machine, f, ins, what):
        self._event(machine, f, ins, "waited", f"{what} waited for")

    def async_issue(self, machine, f, ins, op):
        local = [w - self.local * machine.warps_per_cta for w in np.atleast_1d(op.warps).tolist()
                 if self.local is not None and w // machine.warps_per_cta == self.local]  # fmt: skip
        if local:
            kind, what = _operation(ins, op)
            self.flying[id(op)] = op, Span(self._step(machine), -1, kind, what, source_text(ins), local[0])
            self.now.operations.append(self.flying[id(op)][1])

    def async_done(self, machine, op):
        if self.local is not None and id(op) in self.flying:
            self.flying.pop(id(op))[1].end = self._step(machine)


def _operation(ins, op):
    """(row of the picture, words) of an asynchronous operation."""
    if hasattr(op, "pieces"):
        size = f"{op.pieces[5]} bytes"
        return ("bulk store", f"store {size}") if op.mbar is None else ("bulk load", f"load {size} for mbarrier 0x{op.mbar:x}")
    if getattr(op, "shape", None):
        return "tcgen05 mma", "mma {}x{}x{}".format(*op.shape)
    if ins.parts[0] == "wgmma":
        return "wgmma", f"wgmma {ins.parts[4]}"
    return f"tcgen05 {ins.parts[1]}", f"tcgen05.{ins.parts[1]}"


def text(launch):
    """The launch as lines: per warp what share of the steps it ran and waited, then everything in order."""
    lines = [f"{launch.kernel}, grid {'x'.join(map(str, launch.grid))}, CTA {launch.cta}: {launch.steps} {STEPS}"]
    for w in range(launch.warps):
        ran = sum(s.end - s.start for s in launch.runs if s.warp == w)
        waits = {}
        for s in launch.waits:
            if s.warp == w:
                key = f"{s.what}{f' [{s.where}]' if s.where else ''}"
                waits[key] = waits.get(key, 0) + s.end - s.start
        top = sorted(waits, key=waits.get, reverse=True)[:3]
        role = launch.role(w)
        lines.append(f"  warp {w}{f' ({role.name})' if role and role.name else ''}: runs {ran}, waits {sum(waits.values())}"
                     + "".join(f"; {waits[k]} on {k}" for k in top))  # fmt: skip
    spans = [*launch.waits, *launch.operations, *launch.events]
    lines.append(f"  {'step':>7} {'warp':>4}  what")
    for s in sorted(spans, key=lambda s: (s.start, s.warp)):
        lines.append(f"  {s.start:7} {s.warp:4}  {_sentence(s)}{f'  [{s.where}]' if s.where else ''}")
    return lines


def _sentence(s):
    if s.kind in WAITS and s.end > s.start:
        return f"waits on {s.what} until {s.end}"
    if s.start == s.end:
        return s.what
    return f"{s.what}, done at {s.end}" if s.end >= 0 else f"{s.what}, done after the last warp"
