"""The two errors every model in this package raises."""

__all__ = ["HwError", "HwUnsupported"]


class HwError(ValueError):
    """The program uses a unit in a way the manual calls invalid or undefined; the message names the field."""


class HwUnsupported(NotImplementedError):
    """A valid use that these models do not cover; the message names what would be needed."""
