"""A case: the sizes of one problem. The ladder's cases stand in ladder.yaml."""

from __future__ import annotations

from dataclasses import dataclass

import torch

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Case:
    """B sequences of T tokens, H q/k heads, HV value heads (a multiple of H), head dimensions K and V.

    gpu: only for machines with a GPU. initial_state: start from a drawn state rather than from zero.
    """

    name: str
    B: int
    T: int
    H: int
    HV: int
    K: int
    V: int
    dtype: str = "bfloat16"
    initial_state: bool = False
    gpu: bool = True

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]


def floor_bytes(case: Case, form: str) -> int:
    """Bytes that any kernel must move: every input read once, every output written once (final state asked for)."""
    io = case.torch_dtype.itemsize
    gate, beta = (io, io) if form == "prod" else (4, 4)
    tokens = case.B * case.T
    per_token = 2 * case.H * case.K * io + case.HV * (2 * case.V * io + case.K * gate + beta)
    states = case.B * case.HV * case.K * case.V * 4 * (2 if case.initial_state else 1)
    parameters = case.HV * (case.K + 1) * 4 if form == "prod" else 0
    return tokens * per_token + states + parameters
