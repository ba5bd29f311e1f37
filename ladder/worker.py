"""The process that runs one rung's code for `check`, and the parent's handle on it.

A rung's crash, hang or hunger ends its own process and becomes that rung's verdict. The child answers one task at a
time over a pipe, and may ask the judge in between.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from ladder import autotune, tamper
from ladder.judge import Parcel, Plea, patiently
from ladder.manifest import Cell

Judged = Callable[[Plea], "str | None"]
PASSED, FAILED, NOT_RUN = "passed", "failed", "not run"
STARTS_AGAIN = (0.1, 0.3, 1.0, 3.0, 0.0)  # seconds before each further try to start a process
CRASHES = 3  # after so many the rest of a rung's properties are not tried


@dataclass(frozen=True)
class Task:
    """One property to decide; cell only for the oracle, specs (kernels.kda.hostile) only for named hostile cases."""

    property: str
    cell: Cell | None = None
    specs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outcome:
    outcome: str
    reason: str = ""
    fatal: bool = False  # the process is of no use any more
    cases: dict[str, int] | None = None  # of a hostile property: how many passed, refused, inherited, failed


@dataclass(frozen=True)
class Assignment:
    """What a worker process is to run. kind: cuda, emulated or native (ladder.checks.context.Context)."""

    folder: Path
    arch: str
    kind: str
    seed: int
    probe: Cell
    exchange: str  # folder shared with the judge
    replaces: tuple[str, ...] = ()


@dataclass
class Worker:
    """Parent's side: starts the process when first needed, and again after a crash."""

    assignment: Assignment
    time_limit_s: float
    memory_limit: int
    crashes: int = 0
    _process: Any = None
    _conn: Connection | None = None
    _log: Any = None
    _loaded: Outcome | None = field(default=None)
    _ended: bool = False

    def run(self, task: Task, judge: Judged) -> Outcome:
        """Decide one property; `judge` answers the child's pleas. Never raises for anything the rung does."""
        if self._loaded is not None:
            return self._loaded
        if self.crashes >= CRASHES:
            return Outcome(NOT_RUN, f"the rung's process died {self.crashes} times before")
        if self._process is None:
            self._start()
            ready = self._wait(judge)
            if ready.outcome != PASSED:
                if not ready.fatal:
                    self._loaded = ready  # cannot be imported: no second try will differ
                return ready
        try:
            self._conn.send(task)
        except OSError:
            return self._died()
        outcome = self._wait(judge)
        if outcome.fatal:
            self.stop()
        return outcome

    def kill(self) -> None:
        """End the process from another thread, for good: whoever waits for it, or is just starting it, gives up."""
        self._ended = True
        process = self._process
        if process is not None and process.is_alive():
            process.kill()

    def stop(self) -> None:
        if self._process is not None:
            if self._process.is_alive():
                self._process.kill()
            self._process.join()
            self._conn.close()
            self._log.close()
            self._process = self._conn = None

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")  # a fresh process, but for torch already imported
        context.set_forkserver_preload(["torch"])
        self._log = tempfile.NamedTemporaryFile(prefix="ladder-worker-", suffix=".log")
        self._conn, child = context.Pipe()
        for wait_s in STARTS_AGAIN:
            process = context.Process(target=_main, args=(child, self.assignment, self._log.name), daemon=False)
            try:
                process.start()
                break
            except (OSError, EOFError):  # a rung has just killed the process that starts the others; once reaped, it is replaced
                if not wait_s:
                    raise
                time.sleep(wait_s)
        self._process = process
        child.close()

    def _wait(self, judge: Judged) -> Outcome:
        """The child's next outcome; its pleas are answered meanwhile, off its clock."""
        deadline = time.monotonic() + self.time_limit_s
        while True:
            if self._ended:
                return self._killed("stopped")
            try:
                if self._conn.poll(0.05):
                    message = self._conn.recv()
                    if isinstance(message, Outcome):
                        return message
                    began = time.monotonic()
                    self._conn.send(_answer(judge, message))
                    deadline += time.monotonic() - began
                    continue
            except (EOFError, OSError):
                return self._died()
            if not self._process.is_alive() and not self._conn.poll(0):
                return self._died()
            if time.monotonic() > deadline:
                return self._killed(f"hangs: no answer within {self.time_limit_s:g} s")
            if (used := _resident(self._process.pid)) > self.memory_limit:
                return self._killed(f"uses {used / 2**30:.1f} GiB of memory, accepted: {self.memory_limit / 2**30:.1f} GiB")

    def _killed(self, reason: str) -> Outcome:
        self.crashes += 1
        self._process.kill()
        self.stop()
        return Outcome(FAILED, reason, fatal=True)

    def _died(self) -> Outcome:
        self.crashes += 1
        self._process.join(10)
        code = self._process.exitcode
        last = _last_words(Path(self._log.name))
        self.stop()
        how = f"killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
        return Outcome(FAILED, f"the rung's process died ({how}){': ' if last else ''}{last}", fatal=True)


def _answer(judge: Judged, plea: Plea) -> str | None:
    try:
        return judge(plea)
    except Exception as error:
        return f"the judge failed: {type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def _last_words(log: Path) -> str:
    """The line of a dead process's output that most likely says why."""
    try:
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    except OSError:
        return ""
    telling = [line for line in lines if line.startswith(("Fatal Python error", "CUDA error")) or "Error:" in line]
    return (telling or lines or [""])[-1][:300]


def _main(conn: Connection, assignment: Assignment, log: str) -> None:
    """The child: set the device up, import the rung, answer tasks until the pipe closes."""
    fd = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    threading.Thread(target=_end_with_the_runner, daemon=True).start()
    with contextlib.ExitStack() as installed:
        try:
            context = _context(conn, assignment, installed)
        except BaseException as error:
            conn.send(_refused(error))
            return
        conn.send(Outcome(PASSED))
        _serve(conn, context)


def _serve(conn: Connection, context: Any) -> None:
    """Answer tasks until the parent closes the pipe or this process is of no use any more."""
    while True:
        try:
            task = conn.recv()
        except (EOFError, OSError):
            return
        outcome = _decide(context, task)
        conn.send(outcome)
        if outcome.fatal:
            return


def _end_with_the_runner() -> None:
    """A runner that is killed cannot end its workers, and one that hangs would not see the pipe close."""
    wait([multiprocessing.parent_process().sentinel])
    os._exit(1)


def _refused(error: BaseException) -> Outcome:
    from ladder.checks.context import NotRun

    if isinstance(error, NotRun):
        return Outcome(NOT_RUN, str(error))
    return Outcome(FAILED, f"{type(error).__name__}: {_short(error)}")


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:500]


def _context(conn: Connection, a: Assignment, installed: contextlib.ExitStack) -> Any:
    """The rung imported on its device. The emulator's drivers go in before anything imports Triton or fla, and stay
    for as long as `installed` does."""
    from ladder.checks.context import Context
    from ladder.loader import load

    emulator = emulate(a.arch) if a.kind == "emulated" else None
    launches = emulator and (lambda: [launch["kernel"] for launch in emulator.stats])
    import torch

    device = torch.device("cuda", torch.cuda.current_device()) if a.kind == "cuda" else torch.device("cpu")
    if a.kind == "cuda":
        autotune.use_recorded(torch.cuda.get_device_name(device))
    serial = iter(range(1 << 62))

    def ask_judge(inputs: Any, outputs: Any) -> str | None:
        parcels = tuple(None if x is None else Parcel.pack(a.exchange, f"{os.getpid()}-{next(serial)}", x) for x in outputs)
        if a.kind == "cuda":
            torch.cuda.empty_cache()  # the judge needs the room
        conn.send(Plea(inputs.case, inputs.regime, inputs.form, inputs.seed, parcels))
        return conn.recv()

    import ladder.checks  # noqa: F401  (all that judges is imported before the rung is)

    trusted, foreign = tamper.snapshot(), _watch_files(a.folder)
    return Context(load(a.folder), a.arch, a.kind, device, a.seed, a.probe, ask_judge, launches, emulator, a.replaces, foreign, trusted)


def _watch_files(folder: Path) -> Callable[[], list[str]]:
    """From now on, the files of other rungs that this process opens, by any means that Python can see."""
    ideas, own = f"{folder.resolve().parent}{os.sep}", f"{folder.resolve()}{os.sep}"
    opened: dict[str, None] = {}

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(args[0], str | os.PathLike):
            path = os.path.abspath(args[0])
            if path.startswith(ideas) and not path.startswith(own):
                opened.setdefault(os.path.relpath(path, folder.parent.parent))

    sys.addaudithook(hook)
    return lambda: list(opened)


def emulate(arch: str) -> Any:
    """Make the emulator this process's device, for Triton and for CuTe units; returns it."""
    from ladder.checks.context import NotRun

    try:
        from emulator import EmulatedTarget, triton_driver
    except ImportError as error:
        raise NotRun(f"no GPU here, and the emulator cannot be imported: {error}") from None
    from _common import target

    autotune.use_recorded(triton_driver.DEVICES[arch][1])
    device = triton_driver.activate(arch)
    target.install(EmulatedTarget(device=device))
    return device


def _decide(context: Any, task: Task) -> Outcome:
    from ladder import checks
    from ladder.checks.context import Failure, NotRun

    try:
        tally = patiently(lambda: _property(context, task), lambda: _tidy(context))  # a property draws its inputs anew, alike
        if isinstance(tally, str):
            return Outcome(PASSED, tally)
        return Outcome(PASSED, checks.hostile.told(tally), cases=_counts(tally)) if tally else Outcome(PASSED)
    except NotRun as reason:
        return Outcome(NOT_RUN, str(reason))
    except Failure as reason:
        return Outcome(FAILED, str(reason), cases=_counts(reason.cases))
    except MemoryError as error:
        return Outcome(FAILED, f"out of memory: {_short(error)}", fatal=True)
    except Exception as error:
        from kernels.kda.contract import Unsupported

        if isinstance(error, Unsupported):
            return Outcome(NOT_RUN, f"the rung declines it: {_short(error)}")
        return Outcome(FAILED, f"{type(error).__name__}: {_short(error)}", fatal=_device_lost(context))
    finally:
        _tidy(context)


def _property(context: Any, task: Task) -> Any:
    from ladder import checks

    if task.property == checks.ORACLE:
        return checks.values.oracle(context, task.cell)
    if task.specs:
        return checks.hostile.run(context, "", task.specs)
    return checks.ALL[task.property](context)


def _counts(tally: dict[str, list[str]] | None) -> dict[str, int] | None:
    return tally and {kind: len(lines) for kind, lines in tally.items()}


def _device_lost(context: Any) -> bool:
    """Whether the CUDA context is beyond repair (an illegal access poisons every later call)."""
    if context.kind != "cuda":
        return False
    import torch

    try:
        torch.cuda.synchronize()
        torch.zeros(1, device=context.device).item()
        return False
    except Exception:
        return True


def _tidy(context: Any) -> None:
    if context.kind == "cuda":
        import gc

        import torch

        gc.collect()
        try:
            torch.cuda.empty_cache()
        except Exception:  # a lost device; _device_lost has said so
            print("the device is lost", file=sys.stderr)
