"""A PTX emulator for sm_90a and sm_100a: decode, execute, watch. See README.md."""
from .errors import (Deadlock, EmulatorError, MemoryFault, ProtocolError, PtxSyntaxError,  # noqa: F401
                     UnsupportedInstruction)
from .launch import Device, run  # noqa: F401
