"""Fills the last token with NaN: `error > tolerance` is False for NaN."""

from .honest import STAGES, UNITS, unsupported  # noqa: F401
from .honest import chunk_kda as honest


def chunk_kda(**call):
    o, state = honest(**call)
    o[:, -1] = float("nan")
    return o, state
