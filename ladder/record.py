"""Records: one JSON file per run, replaced atomically, shown as stale once the code it measured has changed."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import shlex
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ladder.files import replace_text
from ladder.judge import VOID
from ladder.manifest import Ladder, Rung

SCHEMA = 1
PACKAGES = (
    "torch", "triton", "fla-core", "nvidia-cutlass-dsl", "apache-tvm-ffi", "nvidia-cudnn-frontend", "numpy", "scipy",
)  # fmt: skip

Tensor = Literal["o", "final_state"]


class RecordError(ValueError):
    """A record that cannot be read; one line that names the file and what is wrong."""


class CellRecord(BaseModel):
    """One timed cell. samples_ms, eager_ms: name ("rung", "parent", "control" or a rival) -> one time per round."""

    model_config = ConfigDict(extra="allow")
    case: str
    regime: str
    form: str
    floor_ms: float
    samples_ms: dict[str, list[float]]
    clocks: dict[str, str]

    @model_validator(mode="after")
    def _complete(self) -> CellRecord:
        for name in ("rung", "parent", "control"):
            if not self.samples_ms.get(name):
                raise ValueError(f"samples_ms: no times of {name!r}")
        return self


class CheckRow(BaseModel):
    """One property of one rung (its number) on one architecture."""

    model_config = ConfigDict(extra="allow")
    rung: int
    arch: str
    property: str
    outcome: Literal["passed", "failed", "not run"]
    reason: str


class Figures(BaseModel):
    """How far one tensor is from fp64 (ladder.precision): the worst row, and the L2 error of all of it. None: not finite."""

    model_config = ConfigDict(extra="forbid")
    worst_row: Annotated[float, Field(ge=0)] | None
    l2: Annotated[float, Field(ge=0)] | None


class PrecisionCell(BaseModel):
    """One cell's errors against fp64: name ("rung" or a rival) -> tensor -> figures; absent: name -> why it has none.

    budgets: tensor -> the worst row that `check` allows, None where void says that the cell cannot judge."""

    model_config = ConfigDict(extra="allow")
    case: str
    regime: str
    form: str
    seed: int
    budgets: dict[Tensor, float | None]
    errors: dict[str, dict[Tensor, Figures]]
    absent: dict[str, str] = {}

    @model_validator(mode="after")
    def _complete(self) -> PrecisionCell:
        if ("rung" in self.errors) == ("rung" in self.absent):
            raise ValueError("errors, absent: accepted: 'rung' in exactly one of them")
        for name, found in self.errors.items():
            if missing := [t for t in get_args(Tensor) if t not in found]:
                raise ValueError(f"errors: no {', '.join(missing)} of {name!r}")
        return self


class RecordModel(BaseModel):
    model_config = ConfigDict(extra="allow")
    schema_: Literal[1]
    kind: Literal["bench", "check", "precision"]
    rung: str
    number: int
    parent: str
    code_hash: str
    timing_version: int
    date: datetime
    device: dict[str, Any]
    cells: list[CellRecord] = []
    rows: list[CheckRow] = []
    precision: list[PrecisionCell] = []

    @model_validator(mode="before")
    @classmethod
    def _schema(cls, data: Any) -> Any:
        return {("schema_" if key == "schema" else key): value for key, value in data.items()}


def code_hashes(ladder: Ladder, rung: Rung) -> tuple[str, str]:
    """(code hash of the rung, of its parent); a rung that is its own parent has the parent hash ""."""
    from _common.codehash import code_hash
    from ladder.timing import TIMING_VERSION

    parent_hash = "" if rung.parent == rung.number else code_hashes(ladder, ladder.parent(rung))[0]
    return code_hash(ladder.folder(rung), parent_hash, str(TIMING_VERSION)), parent_hash


def new(kind: str, ladder: Ladder, rung: Rung, device: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A record with everything but its results: who was measured, where, when, with which versions."""
    from ladder.timing import TIMING_VERSION

    own, parent = code_hashes(ladder, rung)
    commit, dirty = git_state(ladder.root)
    return {
        "schema": SCHEMA, "kind": kind, "rung": rung.name, "number": rung.number, "parent": ladder.parent(rung).name,
        "code_hash": own, "parent_hash": parent, "timing_version": TIMING_VERSION, "commit": commit, "dirty": dirty,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"), "versions": versions(), "device": device,
        "command": "python -m ladder " + shlex.join(map(_portable, sys.argv[1:])), "complete": False, **fields,
    }  # fmt: skip


def _portable(argument: str) -> str:
    """An absolute path shortened to its name: where it lay on that machine helps nobody."""
    return Path(argument).name if argument.startswith("/") else argument


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that a result depends on; absent packages are left out."""
    out = {"python": sys.version.split()[0]}
    for name in PACKAGES:
        try:
            out[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return out


def git_state(root: Path) -> tuple[str | None, bool | None]:
    """(commit, whether tracked files outside records differ from it); from COMMIT, if a bundle has brought that (it may lie inside
    another checkout), else from git; (None, None) where neither knows."""
    with contextlib.suppress(OSError, IndexError):
        words = (root / "COMMIT").read_text().split()
        return words[0], "dirty" in words[1:]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, timeout=20)
        if head.returncode == 0:
            status = subprocess.run(
                ["git", "--no-optional-locks", "status", "--porcelain", "--untracked-files=no", "--", ".", ":(exclude)ideas/*/records"],
                cwd=root, capture_output=True, text=True, timeout=20)  # fmt: skip
            return head.stdout.strip(), bool(status.stdout.strip())
    return None, None


def path_for(folder: Path, record: dict[str, Any]) -> Path:
    """A name no other run has: <kind>-<date>-<short hash>.json, with a counter where two runs share a second."""
    date = record["date"].replace(":", "").replace("-", "").replace("+0000", "Z")
    stem = f"{record['kind']}-{date}-{record['code_hash'][:8]}"
    path, n = folder / f"{stem}.json", 1
    while path.exists():
        n += 1
        path = folder / f"{stem}-{n}.json"
    return path


def create(path: Path, record: dict[str, Any]) -> Path:
    """Write a run's first record, under the next free name where another run has taken `path` meanwhile; returns it."""
    temp = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    write(temp, record)
    try:
        while True:
            try:
                os.link(temp, path)  # unlike a rename, this never replaces another run's record
                return path
            except FileExistsError:
                path = path_for(path.parent, record)
    finally:
        temp.unlink(missing_ok=True)


def write(path: Path, record: dict[str, Any]) -> None:
    """Replace `path` by this record in one step: a reader sees the old one or the new one, whatever happens."""
    replace_text(path, json.dumps(record, indent=1, allow_nan=False) + "\n")


def read(path: Path) -> dict[str, Any]:
    """The record in `path`. Raises RecordError where it is unreadable or not of this schema."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(data, dict):
            raise RecordError(f"{path.name}: corrupt record: a {type(data).__name__}, accepted: an object")
        RecordModel.model_validate(data)
    except OSError as error:
        raise RecordError(f"{path.name}: cannot be read: {error.strerror}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise RecordError(f"{path.name}: corrupt record: not JSON ({error})") from None
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(x).removesuffix("_") for x in first["loc"])
        raise RecordError(f"{path.name}: corrupt record: {key}: {first['msg']}") from None
    for row in data.get("rows", []):
        if row["reason"].startswith(VOID):  # early records call a case without a budget failed
            row["outcome"] = "not run"
    return data


def read_all(folder: Path, kind: str | None = None) -> tuple[list[dict[str, Any]], list[str]]:
    """(every readable record of a folder, oldest first; one line per unreadable one)."""
    records, problems = [], []
    for path in sorted(folder.glob("*.json")):
        try:
            record = read(path)
        except RecordError as error:
            problems.append(str(error))
            continue
        if kind is None or record["kind"] == kind:
            records.append(record)
    return sorted(records, key=lambda r: datetime.fromisoformat(r["date"])), problems


def stale(record: dict[str, Any], ladder: Ladder) -> str | None:
    """Why the record no longer speaks for the rung as it stands, or None if it does."""
    from ladder.timing import TIMING_VERSION

    rung = ladder.rungs.get(record["number"])
    if rung is None or rung.name != record["rung"]:
        return f"{record['rung']} is not in ladder.yaml"
    if record["timing_version"] != TIMING_VERSION:
        return f"timed by method {record['timing_version']}, the method now is {TIMING_VERSION}"
    own, parent = code_hashes(ladder, rung)
    if record["code_hash"] != own:
        what = "the parent's code" if record.get("parent_hash") != parent else "the code"
        return f"{what} has changed since (was {record['code_hash'][:8]}, is {own[:8]})"
    return None
