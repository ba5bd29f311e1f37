"""Reads one token ahead."""

from .honest import STAGES, UNITS, unsupported  # noqa: F401
from .honest import chunk_kda as honest


def chunk_kda(**call):
    v = call["v"] + 0.02 * call["v"].roll(-1, 1)
    return honest(**{**call, "v": v})
