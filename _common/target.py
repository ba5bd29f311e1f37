"""Where a rung runs: the visible GPU, or whatever stands in for one (the emulator)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import cache
from typing import Protocol

from _common.cute import Unit, load_compiled


class Target(Protocol):
    """arch: "sm_90a", "sm_100a" or "sm_103a". load(unit) gives the unit's host function: fn(*tensors, *scalars)."""

    arch: str

    def load(self, unit: Unit) -> Callable: ...


class Cuda:
    """The current CUDA device."""

    def __init__(self, arch: str) -> None:
        self.arch = arch
        self.load = cache(load_compiled)


_installed: list[Target] = []  # the last one counts, for every thread of the process


def current() -> Target:
    """The installed target, else the visible GPU. Raises RuntimeError where there is neither."""
    return _installed[-1] if _installed else _cuda()


def install(target: Target) -> None:
    """Run rungs on `target` for the rest of this process."""
    _installed.append(target)


@contextlib.contextmanager
def use(target: Target) -> Iterator[Target]:
    """Run rungs on `target` inside the block."""
    install(target)
    try:
        yield target
    finally:
        _installed.remove(target)


@cache
def _cuda() -> Cuda:
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError("target: no GPU is visible; accepted: a CUDA device, or a target installed with use()")
    major, minor = torch.cuda.get_device_capability()
    return Cuda(f"sm_{major}{minor}a")
