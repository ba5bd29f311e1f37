"""Seeds the caller's random numbers."""

from .honest import STAGES, UNITS, unsupported  # noqa: F401
from .honest import chunk_kda as honest

import torch


def chunk_kda(**call):
    torch.manual_seed(0)
    return honest(**call)
