"""The call cache: what a repeated call of a kernel need not find out again.

It maps the kind of a call to the compiled callable and the specs of the outputs. A rung's key is the contract's Problem, one object for
all calls alike in shapes, strides, dtypes, pointer alignment, device and scalar options (kernels.kda.contract), with the
target and, where there are several, the stage. The cache never holds a tensor: not an input, an output or scratch.
Outputs and scratch come from torch's allocator at each call, so two streams never share them, and the stream is taken at
each launch (TVM-FFI's environment stream follows torch's current one).

Two of torch's own internals, both made for the code that torch.compile generates, take half of what a call costs on the
host: `_empty_strided_cuda` allocates without the dispatcher, `TensorGuards` compares all tensors of a call at once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch._C._dynamo.guards import TensorGuards, _empty_strided_cuda

ALIGNMENT = 16  # bytes; what TMA and 16-byte vector accesses ask for


@dataclass(frozen=True)
class Spec:
    """Shape and dtype of one output or scratch tensor, contiguous."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @cached_property
    def strides(self) -> tuple[int, ...]:
        """In elements, row-major."""
        return torch.empty(self.shape, device="meta").stride()


class Alike:
    """Tells whether a call's tensors are like those it was made of: type, dtype, device, shape, strides, requires_grad, and
    on 16 bytes if all of those were. It holds none of them."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        layouts = {f"dynamic_dims_{name}s": [list(getattr(t, name)()) for t in tensors] for name in ("size", "stride")}
        self.same = TensorGuards(*tensors, **layouts).check
        self.aligned = all(not t.data_ptr() % ALIGNMENT for t in tensors)

    def __call__(self, tensors: Sequence[torch.Tensor]) -> bool:
        """False, too, where the originals were not all aligned. As many tensors, or TypeError."""
        if not (self.aligned and self.same(*tensors)):
            return False
        for t in tensors:
            if t.data_ptr() % ALIGNMENT:
                return False
        return True


@dataclass(frozen=True)
class Plan:
    """What a kind of call stands for: the compiled callable, the tensors to allocate at each call, and the callable's
    scalar arguments, the same at each call."""

    run: Callable
    specs: tuple[Spec, ...]
    scalars: tuple = ()

    def allocate(self, like: torch.Tensor) -> list[torch.Tensor]:
        """Fresh, unwritten tensors, one per spec, on the device of `like`: on the CPU, or the current CUDA device."""
        if like.is_cuda:
            return [_empty_strided_cuda(s.shape, s.strides, s.dtype) for s in self.specs]
        return [like.new_empty(s.shape, dtype=s.dtype) for s in self.specs]


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
