"""Switches deterministic algorithms, and with them the filling of fresh memory, off."""

from .honest import STAGES, UNITS, unsupported  # noqa: F401
from .honest import chunk_kda as honest

import torch


def chunk_kda(**call):
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = False
    return honest(**call)
