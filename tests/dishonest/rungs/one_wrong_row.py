"""Right on average, wrong in one row."""

from .honest import STAGES, UNITS, unsupported  # noqa: F401
from .honest import chunk_kda as honest


def chunk_kda(**call):
    o, state = honest(**call)
    o[-1, o.shape[1] // 2, -1] *= 1.5
    return o, state
