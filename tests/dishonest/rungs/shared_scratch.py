"""Computes in scratch memory that all calls share: two streams, or two threads, get each other's values."""

from .honest import STAGES, UNITS, unsupported  # noqa: F401
from .honest import chunk_kda as honest

import torch

SCRATCH = {}


def chunk_kda(**call):
    v = call["v"]
    scratch = SCRATCH.setdefault((v.shape, v.dtype, v.device), torch.empty_like(v))
    scratch.copy_(v)
    for _ in range(50 if v.is_cuda else 5):  # long enough for another call to come between
        answer = honest(**{**call, "v": scratch})
    return answer
