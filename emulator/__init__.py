"""A PTX emulator for sm_90a and sm_100a: decode, execute, watch. See README.md."""

from .errors import (
    Deadlock,
    EmulatorError,
    MemoryFault,
    ProtocolError,
    PtxSyntaxError,  # noqa: F401
    UnsupportedInstruction,
)
from .launch import Device, run  # noqa: F401
from .watch import Watch  # noqa: F401


def __getattr__(name):
    # needs the rest of the project (_common) and tvm_ffi, which `run` does not
    if name == "EmulatedTarget":
        from .cute_host import EmulatedTarget

        return EmulatedTarget
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
