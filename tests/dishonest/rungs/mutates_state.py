"""Leaves the final state in the caller's initial state."""

from .honest import STAGES, UNITS, unsupported  # noqa: F401
from .honest import chunk_kda as honest


def chunk_kda(**call):
    o, state = honest(**call)
    if call.get("initial_state") is not None and state is not None:
        call["initial_state"].copy_(state)
    return o, state
