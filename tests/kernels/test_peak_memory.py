"""Several judges share a GPU with the rungs that they judge: the largest cases must leave them room.

The steps of a judgement run on meta tensors, and what is alive after each operation is counted. Memory grows linearly with
the tokens, so that two short sequences tell the peak of a long one.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kernels.kda import budget, inputs, oracle
from kernels.kda.contract import shapes
from ladder import manifest

LIMIT_GIB = 10


class Peak(TorchDispatchMode):
    """Most bytes alive at once, those of `held` included."""

    def __init__(self, *held):
        super().__init__()
        self.live, self.bytes = {}, 0
        self._note(held)

    def _note(self, tree):
        storages = [t.untyped_storage() for t in tree_leaves(tree) if isinstance(t, torch.Tensor)]
        self.live |= {s._cdata: (StorageWeakRef(s), s.nbytes()) for s in storages}
        self.live = {at: kept for at, kept in self.live.items() if not kept[0].expired()}
        self.bytes = max(self.bytes, sum(nbytes for _, nbytes in self.live.values()))

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        self._note(out)
        return out


def blank_call(case, form):
    small = inputs.make(replace(case, B=1, T=1, H=1, HV=1), "strong", form, 0).call()
    full = shapes(case.B, case.T, case.H, case.HV, case.K, case.V)
    return {name: torch.empty(full[name], dtype=t.dtype, device="meta") if isinstance(t, torch.Tensor) else t
            for name, t in small.items()}  # fmt: skip


def peaks(case, form):
    """Bytes by step: the exact answer, the low-precision one beside it, errors of that, and of what a rung hands over."""
    call = blank_call(case, form)
    out = {}
    with Peak(call) as peak:
        exact = oracle.chunked(**call)
    out["oracle"] = peak.bytes
    with Peak(call, exact) as peak:
        low = budget.low_precision(**call)
    out["low precision"] = peak.bytes
    with Peak(call, exact, low) as peak:
        budget.row_errors(low[0], exact[0])
    out["errors"] = peak.bytes
    return out


@pytest.mark.parametrize("form", inputs.FORMS)
@pytest.mark.parametrize("name", ["t32768_h32", "h96", "train"])
def test_a_judgement_of_the_largest_cases_leaves_room(name, form):
    case = next(c.case for c in manifest.load().cells(gpu=True) if c.case.name == name)
    one, two = (peaks(replace(case, T=n * oracle.SPAN), form) for n in (2, 3))
    for step, first in one.items():
        full = first + (two[step] - first) * (case.T // oracle.SPAN - 2)
        assert full < LIMIT_GIB * 2**30, f"{step}: {full / 2**30:.1f} GiB"
