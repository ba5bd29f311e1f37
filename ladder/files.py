"""Files that a reader sees whole: the old one or the new one, whatever happens to the writer; and folders for one at a time."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Waits for whoever else holds the folder. The lock is on the folder itself, so that no file is left."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def replace_text(path: Path, text: str, mode: int = 0o644) -> None:
    """Write `text` beside `path`, on disk before it takes its place in one step. Makes the folder; leaves nothing else."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd, temp = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temp, mode)
        os.replace(temp, path)
    except BaseException:
        Path(temp).unlink(missing_ok=True)
        raise
