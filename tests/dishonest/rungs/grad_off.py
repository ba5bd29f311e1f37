"""Switches autograd off and forgets to switch it on again."""

from .honest import STAGES, UNITS, unsupported  # noqa: F401
from .honest import chunk_kda as honest

import torch


def chunk_kda(**call):
    torch.set_grad_enabled(False)
    return honest(**call)
