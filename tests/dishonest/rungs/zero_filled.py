"""Leaves the last token at zero: an absolute tolerance does not see a short row of zeros."""

from .honest import STAGES, UNITS, unsupported  # noqa: F401
from .honest import chunk_kda as honest


def chunk_kda(**call):
    o, state = honest(**call)
    o[:, -1] = 0
    return o, state
