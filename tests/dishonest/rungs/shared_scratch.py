"""Computes in scratch memory that all calls share: two streams, or two threads, get each other's values."""

from .honest import STAGES, UNITS, unsupported  # noqa: F401
from .honest import chunk_kda as honest

import torch

SCRATCH = {}


def chunk_kda(**call):
    v = call["v"]
    scratch = SCRATCH.setdefault((v.shape, v.dtype, v.device), torch.empty_like(v))
    scratch.copy_(v)
    if v.is_cuda:  # long enough for another call to come between
        torch.cuda._sleep(20_000_000)
        return honest(**{**call, "v": scratch})
    for _ in range(5):
        answer = honest(**{**call, "v": scratch})
    return answer
