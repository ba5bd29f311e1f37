"""Returns the answer of the call before."""

from .honest import STAGES, UNITS, unsupported  # noqa: F401
from .honest import chunk_kda as honest

KEPT = {}


def chunk_kda(**call):
    now = honest(**call)
    before = KEPT.get(now[0].shape, now)
    KEPT[now[0].shape] = now
    return before
