"""The judge: holds the oracle's answers and compares what rungs hand over, in a process that no rung's code runs in.

Outputs travel as raw files in a folder that rung and judge share; the judge draws the inputs again from their seed, so
that nothing a rung does to its own copy matters.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from ladder.files import locked

RECURRENT_UP_TO = 1024  # tokens; beyond, the chunked fp64 form answers (it agrees with the recurrence to 1e-10)
PREFIX = "ladder-judge-"
VOID = "void: "
KEPT_BYTES = {"cuda": 4 << 30, "cpu": 1 << 30}  # one reference may be larger; then it is the only one
PATIENCE_S, FIRST_PAUSE_S, LONGEST_PAUSE_S = 120.0, 1.0, 15.0

T = TypeVar("T")


def starved(error: BaseException | None) -> bool:
    """Whether it says that the GPU has no memory left, in torch's words or, from another library, in the driver's."""
    return isinstance(error, torch.OutOfMemoryError) or (isinstance(error, RuntimeError) and "out of memory" in str(error).lower())


def patiently(call: Callable[[], T], make_room: Callable[[], None]) -> T:
    """call(), and again after growing pauses while the GPU has no room for it: other checks share it. `make_room` gives
    back what this process can spare. After PATIENCE_S the error is raised."""
    deadline, pause = time.monotonic() + PATIENCE_S, FIRST_PAUSE_S
    while True:
        try:
            return call()
        except Exception as error:
            if not starved(error) or time.monotonic() + pause > deadline:
                raise
        make_room()  # not above: what failed holds its tensors for as long as its error is being handled
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_S)


@dataclass(frozen=True)
class Parcel:
    """One tensor on its way from rung to judge."""

    path: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def pack(cls, folder: str, name: str, x: torch.Tensor) -> Parcel:
        parcel = cls(str(Path(folder) / name), tuple(x.shape), x.dtype)
        if x.numel():
            Path(parcel.path).touch()
            parcel._map().copy_(x)
        return parcel

    def unpack(self, device: torch.device) -> torch.Tensor:
        if 0 in self.shape:
            return torch.empty(self.shape, dtype=self.dtype, device=device)
        return self._map().to(device, copy=True)

    def discard(self) -> None:
        Path(self.path).unlink(missing_ok=True)

    def _map(self) -> torch.Tensor:
        size = torch.Size(self.shape).numel()
        return torch.from_file(self.path, shared=True, size=size, dtype=self.dtype).view(self.shape)


@dataclass(frozen=True)
class Plea:
    """Outputs to be judged, and what the inputs were drawn from."""

    case: Any
    regime: str
    form: str
    seed: int
    tensors: tuple[Parcel | None, Parcel | None]


class Judge:
    """Answers pleas. References are computed once per (case, regime, form, seed) and shared by all rungs."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        place = Path(_roomy() or tempfile.gettempdir())
        with locked(place):  # else another's sweep may take a folder that nobody holds yet
            self.folder = tempfile.TemporaryDirectory(prefix=PREFIX, dir=place)
            self._held = _hold(Path(self.folder.name))
            _sweep(place)
        self._kept: OrderedDict[tuple, Any] = OrderedDict()
        self.computed = 0

    def close(self) -> None:
        self._kept.clear()
        self.folder.cleanup()
        os.close(self._held)

    def answer(self, plea: Plea) -> str | None:
        """None if every tensor is within its budget, else what is wrong with each that is not; VOID first where only
        the reference is to blame."""
        try:
            return patiently(lambda: self._verdict(plea), self._make_room)
        finally:
            for parcel in plea.tensors:
                if parcel:
                    parcel.discard()
            self._release()

    def _verdict(self, plea: Plea) -> str | None:
        from kernels.kda import budget

        reference = self.reference(plea.case, plea.regime, plea.form, plea.seed)
        o, state = (None if p is None else p.unpack(self.device) for p in plea.tensors)
        verdicts = budget.judge(o, state, reference)
        reasons = [v.reason for v in verdicts if not v.passed]
        if reference.void and all(reason.startswith(VOID) for reason in reasons):
            return f"{VOID}{reference.void}"
        return "; ".join(reasons) or None

    def reference(self, case: Any, regime: str, form: str, seed: int) -> Any:
        """The exact answer and its budgets (kernels.kda.budget.Reference)."""
        from kernels.kda import budget, hostile, inputs, oracle

        key = (case, regime, form, seed)
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        coming = 8 * case.HV * case.V * case.B * (case.T + case.K)  # o and the state, in fp64
        while self._kept and coming + sum(map(_size, self._kept.values())) > KEPT_BYTES[self.device.type]:
            self._kept.popitem(last=False)  # before there is another: computing it takes more than keeping it
        odd = regime == hostile.REGIME
        call = (hostile.make(case.name, seed, self.device) if odd else inputs.make(case, regime, form, seed, self.device)).call()
        self._release()  # between the steps, too: the blocks of one seldom fit the next
        exact = oracle.recurrent(**call) if case.T <= RECURRENT_UP_TO else oracle.chunked(**call)
        self._release()
        self._kept[key] = budget.reference(exact, hostile.VOID_ABOVE if odd else budget.VOID_ABOVE, **call)
        self.computed += 1
        self._release()
        return self._kept[key]

    def _make_room(self) -> None:
        self._kept.clear()
        self._release()

    def _release(self) -> None:
        """Give cached blocks back: the rungs' processes, and other checks, need the room."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def _size(reference: Any) -> int:
    return reference.o.nbytes + reference.state.nbytes


def _hold(folder: Path) -> int:
    """Lock a folder for as long as this process lives; returns the lock's descriptor."""
    fd = os.open(folder, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return fd


def _sweep(place: Path) -> None:
    """Remove the folders of runners that were killed: those that nobody holds any more."""
    for folder in place.glob(f"{PREFIX}*"):
        try:
            fd = _hold(folder)
        except OSError:
            continue  # held, gone, or not ours to remove
        shutil.rmtree(folder, ignore_errors=True)
        os.close(fd)


def _roomy() -> str | None:
    """Shared memory where it is large, else the usual place for temporary files."""
    try:
        room = os.statvfs("/dev/shm")
        return "/dev/shm" if room.f_bavail * room.f_frsize > 8 << 30 else None
    except OSError:
        return None
