"""What a property may do: draw inputs, call the rung, have an answer judged, fail in words."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from ladder.cells import draw, problem_of, seed_for
from ladder.judge import VOID
from ladder.loader import LoadedRung
from ladder.manifest import Cell

Outputs = tuple[torch.Tensor, torch.Tensor | None]


class Failure(Exception):
    """The property does not hold; the message says what is wrong. cases: the tally of hostile cases, where there is one."""

    def __init__(self, message: str, cases: dict[str, list[str]] | None = None) -> None:
        super().__init__(message)
        self.cases = cases


class NotRun(Exception):
    """The property cannot be decided here; the message says why."""


@dataclass
class Context:
    """One rung on one architecture of one machine.

    kind: "cuda", "emulated" (CPU tensors, compiled kernels executed by the emulator) or "native" (a rung of plain
    torch on CPU tensors). probe: the cell that properties other than the oracle use. ask_judge sends outputs to the
    judge's process and returns its complaint or None. launches: kernel names the emulator has seen so far.
    """

    rung: LoadedRung
    arch: str
    kind: str
    device: torch.device
    seed: int
    probe: Cell
    ask_judge: Callable[[Any, Outputs], str | None]
    launches: Callable[[], list[str]] | None = None
    emulator: Any = None  # the emulator.Device, where kind is "emulated"
    replaces: tuple[str, ...] = ()  # stages of fla's that the rung says it replaces
    foreign: Callable[[], list[str]] = list  # other rungs' files that this process has opened
    trusted: dict[str, dict[str, Any]] = field(default_factory=dict)  # ladder.tamper.snapshot from before the rung came
    exercised: set[tuple[str, bool]] = field(default_factory=set)
    _base: tuple[Any, Outputs] | None = None

    @property
    def slow(self) -> bool:
        """Whether a call takes seconds rather than milliseconds."""
        return self.kind == "emulated"

    def needs_gpu(self, why: str) -> None:
        if self.kind != "cuda":
            raise NotRun(f"needs a GPU: {why}")

    def draw(self, *purpose: Any, cell: Cell | None = None) -> Any:
        """Inputs of `cell` (the probe by default), fresh for each purpose, the same for every rung of a command."""
        cell = cell or self.probe
        return draw(cell, seed_for(self.seed, *cell.key, *purpose), self.device)

    def call(self, inputs: Any, **changes: Any) -> Outputs:
        """(o, final state) of the rung on these inputs, seen to be plain tensors of the promised shape and dtype."""
        call = {**inputs.call(), **changes}
        with torch.no_grad():
            result = self.rung.chunk_kda(**call)
        self.exercised.add((inputs.form, bool(call.get("safe_gate"))))
        return _validated(result, call)

    def supported(self, inputs: Any) -> None:
        """Raises NotRun with the rung's own reason where it declines this problem."""
        if reason := self.rung.unsupported(problem_of(inputs)):
            raise NotRun(f"the rung declines it: {reason}")

    def judged(self, inputs: Any, outputs: Outputs, when: str = "") -> None:
        """Raises Failure where the outputs are outside the error budget of these inputs, NotRun where these inputs have
        no budget because the low-precision reference is too far off itself."""
        if complaint := self.ask_judge(inputs, outputs):
            if complaint.startswith(VOID):
                raise NotRun(complaint)
            raise Failure(f"{when}{': ' if when else ''}{complaint}")

    def base(self) -> tuple[Any, Outputs]:
        """Inputs of the probe and the rung's outputs for them, computed once; callers must not change either."""
        if self._base is None:
            inputs = self.draw("base")
            self.supported(inputs)
            self._base = inputs, self.call(inputs)
        return self._base

    def synchronize(self) -> None:
        if self.kind == "cuda":
            torch.cuda.synchronize(self.device)

    @contextmanager
    def poisoned(self, inputs: Any):
        """Memory that torch hands out inside the block holds NaN unless somebody writes to it.

        On a GPU fresh memory does, too, that is not asked of torch.empty; what torch.empty gives is filled each time, since
        it may be what the same call has used and freed before.
        """
        if self.kind == "cuda":
            poison_allocator(self.device, 6 * sum(t.numel() * t.element_size() for t in inputs.tensors.values()))
        before = (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled(),
                  torch.utils.deterministic.fill_uninitialized_memory)  # fmt: skip
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = True
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])
            torch.utils.deterministic.fill_uninitialized_memory = before[2]


def poison_allocator(device: torch.device, nbytes: int) -> None:
    """Leave torch's CUDA allocator with nothing cached but blocks full of NaN: one large, and many small ones."""
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    nbytes = max(nbytes, 32 << 20)  # less would come from the small blocks' pool and leave a corner of that unfilled
    blocks = [torch.full((min(nbytes, free // 2) // 4,), torch.nan, device=device)]
    blocks += [torch.full((1 << 17,), torch.nan, device=device) for _ in range(64)]  # half a MiB: the small pool
    torch.cuda.synchronize(device)
    del blocks


def _validated(result: Any, call: dict[str, Any]) -> Outputs:
    if not isinstance(result, tuple) or len(result) != 2:
        raise Failure(f"chunk_kda returned a {type(result).__name__}, accepted: (o, final_state)")
    o, state = result
    q, v = call["q"], call["v"]
    (B, T, _, K), (HV, V) = q.shape, v.shape[2:]
    _tensor("o", o, (B, T, HV, V), q.dtype, q.device)
    if call.get("output_final_state"):
        _tensor("final_state", state, (B, HV, K, V), torch.float32, q.device)
    elif state is not None:
        raise Failure("final_state: returned without being asked for, accepted: None")
    return o, state


def _tensor(name: str, x: Any, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    if type(x) is not torch.Tensor:
        raise Failure(f"{name}: returned a {type(x).__name__}, accepted: a plain torch.Tensor, computed when returned")
    if tuple(x.shape) != shape or x.dtype != dtype or x.device != device:
        raise Failure(f"{name}: returned {tuple(x.shape)} {x.dtype} on {x.device}, accepted: {shape} {dtype} on {device}")


def first_difference(a: torch.Tensor, b: torch.Tensor) -> str:
    """How two tensors of one shape differ bitwise, in words; "" where they do not."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    differ = a.contiguous().view(bits) != b.contiguous().view(bits)
    count = int(differ.sum())
    if not count:
        return ""
    where = tuple(int(i) for i in torch.unravel_index(differ.flatten().to(torch.uint8).argmax(), differ.shape))
    worst = (a.double() - b.double()).abs().max().item()
    return f"{count} of {a.numel()} elements differ (first at {where}, largest difference {worst:.2e})"


def same(label: str, now: Outputs, before: Outputs) -> None:
    """Raises Failure unless both outputs are bitwise what they were."""
    for name, a, b in zip(("o", "final_state"), now, before):
        if (a is None) != (b is None):
            raise Failure(f"{name} {label}: present once, absent once")
        if a is not None and (difference := first_difference(a, b)):
            raise Failure(f"{name} {label}: {difference}")
