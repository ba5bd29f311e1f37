"""Writes its answers into three buffers in turn: two calls in a row look right."""

from .honest import STAGES, UNITS, unsupported  # noqa: F401
from .honest import chunk_kda as honest

KEPT, TURN = {}, iter(range(1 << 62))


def chunk_kda(**call):
    o, state = honest(**call)
    buffer = KEPT.setdefault((o.shape, o.dtype, next(TURN) % 3), o)
    return buffer.copy_(o), state
