"""Keeps a megabyte of every call."""

from .honest import STAGES, UNITS, unsupported  # noqa: F401
from .honest import chunk_kda as honest

import torch

KEPT = []


def chunk_kda(**call):
    KEPT.append(torch.ones(1 << 18, device=call["q"].device))
    return honest(**call)
