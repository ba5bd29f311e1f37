"""Writes every answer into the same buffer, so that the caller's last one changes under its hands."""

from .honest import STAGES, UNITS, unsupported  # noqa: F401
from .honest import chunk_kda as honest

KEPT = {}


def chunk_kda(**call):
    o, state = honest(**call)
    buffer = KEPT.setdefault((o.shape, o.dtype), o)
    return buffer.copy_(o), state
