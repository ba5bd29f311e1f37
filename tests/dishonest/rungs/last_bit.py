"""Differs from call to call in the last bit of one element, as a sum by atomics does."""

from .honest import STAGES, UNITS, unsupported  # noqa: F401
from .honest import chunk_kda as honest

import torch

COIN = torch.Generator()
COIN.seed()


def chunk_kda(**call):
    o, state = honest(**call)
    o.view(torch.int16)[0, 9, 0, 3] ^= int(torch.randint(2, (), generator=COIN))
    return o, state
