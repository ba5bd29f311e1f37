"""Is slower, and makes the clock that times it run slower still."""

from .honest import STAGES, UNITS, unsupported  # noqa: F401
from .honest import chunk_kda as honest

import time

import torch

THREAD_TIME = time.thread_time


def chunk_kda(**call):
    time.thread_time = lambda: THREAD_TIME() / 4
    torch.cuda.Event.elapsed_time = lambda self, end: 1e-3
    return honest(**call)
