"""The files that a capture leaves: arrays by the hash of their contents, each once, and an index.

record.json       where, when and with what versions it was made, what failed, and the hash of the other files
index.json.xz     PTX texts by hash, the programs' answers and the stages' records, which name arrays by hash
programs.npz.xz, stages.npz.xz   the arrays
"""

from __future__ import annotations

import hashlib
import io
import json
import lzma
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(__file__).parent / "fixtures"
PARTS = ("programs", "stages")
LARGEST = 16 * 2**20  # bytes of one file that come back from a device machine


class FixtureError(RuntimeError):
    """A fixture that cannot be read, or is not whole; one line."""


class Arrays:
    """Arrays by content. put gives the reference under which get finds one again."""

    def __init__(self, held: dict[str, np.ndarray] | None = None) -> None:
        self.held = held if held is not None else {}

    def put(self, x: np.ndarray, dtype: str | None = None) -> dict[str, Any]:
        """dtype: the name to keep where numpy has none (bfloat16)."""
        x = np.ascontiguousarray(x)
        flat = x.reshape(-1).view(f"u{x.itemsize}")
        key = hashlib.sha256(f"{flat.dtype}".encode() + flat.tobytes()).hexdigest()[:24]
        self.held.setdefault(key, flat)
        return {"array": key, "dtype": dtype or str(x.dtype), "shape": list(x.shape)}

    def get(self, ref: dict[str, Any]) -> np.ndarray:
        """A copy; bfloat16 as uint16."""
        dtype = "uint16" if ref["dtype"] == "bfloat16" else ref["dtype"]
        return self.held[ref["array"]].view(dtype).reshape(ref["shape"]).copy()

    def save(self, path: Path) -> None:
        raw = io.BytesIO()
        np.savez(raw, **self.held)
        path.write_bytes(lzma.compress(raw.getvalue(), preset=4))

    @classmethod
    def load(cls, path: Path) -> Arrays:
        with np.load(io.BytesIO(lzma.decompress(path.read_bytes()))) as held:
            return cls(dict(held))


def write(folder: Path, record: dict, index: dict, arrays: dict[str, Arrays]) -> None:
    """All files of a capture. Raises FixtureError where one is too large to come home."""
    folder.mkdir(parents=True, exist_ok=True)
    for part in PARTS:
        arrays[part].save(folder / f"{part}.npz.xz")
    (folder / "index.json.xz").write_bytes(lzma.compress(json.dumps(index).encode(), preset=4))
    names = ["index.json.xz", *(f"{part}.npz.xz" for part in PARTS)]
    record["files"] = {n: hashlib.sha256((folder / n).read_bytes()).hexdigest() for n in names}
    (folder / "record.json").write_text(json.dumps(record, indent=1) + "\n")
    for name in names:
        if (folder / name).stat().st_size > LARGEST:
            raise FixtureError(f"{name} has {(folder / name).stat().st_size} bytes, at most {LARGEST} come back")


class Fixture:
    """A capture read back: record, index, arrays by part. Raises FixtureError for a file that is missing or another one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self.record = json.loads((folder / "record.json").read_text())
            for name, digest in self.record["files"].items():
                if hashlib.sha256((folder / name).read_bytes()).hexdigest() != digest:
                    raise FixtureError(f"{name} is not the file that record.json was written for")
        except (OSError, ValueError, KeyError) as e:
            raise FixtureError(f"{folder.name}: no whole capture: {type(e).__name__}: {e}") from e
        self.index = json.loads(lzma.decompress((folder / "index.json.xz").read_bytes()))
        self.arrays = {part: Arrays.load(folder / f"{part}.npz.xz") for part in PARTS}


def present(folder: Path = FOLDER) -> bool:
    """Whether a capture has been filed."""
    return (folder / "record.json").is_file()
