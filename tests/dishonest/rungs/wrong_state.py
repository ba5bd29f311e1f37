"""Right for o, five per cent off in the final state, which nobody compares."""

from .honest import STAGES, UNITS, unsupported  # noqa: F401
from .honest import chunk_kda as honest


def chunk_kda(**call):
    o, state = honest(**call)
    return o, state if state is None else state * 1.05
