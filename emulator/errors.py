"""Errors of the emulator. Each says what happened, in which kernel, and at which PTX (and source) line."""


class EmulatorError(RuntimeError):
    """Base class. `where` is filled in by the engine: kernel, CTA, warps, PTX line, source line."""

    def __init__(self, message, where=None):
        super().__init__(message)
        self.message, self.where = message, where

    def __str__(self):
        return f"{self.message} [{self.where}]" if self.where else self.message


class PtxSyntaxError(EmulatorError):
    """The text is not PTX that the decoder understands."""


class UnsupportedInstruction(EmulatorError):
    """An opcode, modifier or operand form that no handler models; never guessed."""


class MemoryFault(EmulatorError):
    """Out-of-bounds or misaligned access, or a write to a read-only allocation."""


class Deadlock(EmulatorError):
    """No warp can make progress; the message lists who waits on what."""


class ProtocolError(EmulatorError):
    """A synchronisation rule of the PTX manual was broken (counts, alignment, phases, divergence)."""
