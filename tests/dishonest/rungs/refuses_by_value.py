"""Looks at the gate's values and refuses the ones it gets wrong."""

from .honest import STAGES, UNITS, unsupported  # noqa: F401
from .honest import chunk_kda as honest

from kernels.kda.contract import Unsupported


def chunk_kda(**call):
    if not call.get("use_gate_in_kernel") and float(call["g"].min()) < -4.5:
        raise Unsupported("g: given strong decays, accepted: weak ones")
    return honest(**call)
