"""Leaves another default dtype behind."""

from .honest import STAGES, UNITS, unsupported  # noqa: F401
from .honest import chunk_kda as honest

import torch


def chunk_kda(**call):
    answer = honest(**call)
    torch.set_default_dtype(torch.float16)
    return answer
