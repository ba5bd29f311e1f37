"""The call cache: what a repeated call of a kernel need not find out again.

It maps the kind of a call to the compiled callable and the specs of the outputs. A rung's key is the contract's Problem, one object for
all calls alike in shapes, strides, dtypes, pointer alignment, device and scalar options (kernels.kda.contract), with the
target and, where there are several, the stage. The cache never holds a tensor: not an input, an output or scratch.
Outputs and scratch come from torch's allocator at each call, so two streams never share them, and the stream is taken at
each launch (TVM-FFI's environment stream follows torch's current one).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Spec:
    """Shape and dtype of one output or scratch tensor, contiguous."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Plan:
    """What a kind of call stands for: the compiled callable, the tensors to allocate at each call, and the callable's
    scalar arguments, the same at each call."""

    run: Callable
    specs: tuple[Spec, ...]
    scalars: tuple = ()

    def allocate(self, like: torch.Tensor) -> list[torch.Tensor]:
        """Fresh, unwritten tensors, one per spec, on the device of `like`."""
        new = like.new_empty  # half of torch.empty's argument parsing
        return [new(s.shape, dtype=s.dtype) for s in self.specs]


class CallCache:
    """Plans by key, the least recently used dropped beyond `limit`."""

    def __init__(self, limit: int = 256) -> None:
        self.limit = limit
        self._plans: OrderedDict[Hashable, Plan] = OrderedDict()

    def __len__(self) -> int:
        return len(self._plans)

    def plan(self, key: Hashable, make: Callable[[], Plan]) -> Plan:
        """The plan for calls of this kind; `make` is asked once per key."""
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = make()
            if len(self._plans) > self.limit:
                self._plans.popitem(last=False)
        else:
            self._plans.move_to_end(key)
        return plan
