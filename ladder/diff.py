"""The real difference of a rung to its parent, and whether its notes list it truthfully.

A rung is a full copy of its parent with one idea changed, so the difference of the two folders *is* the idea. Notes,
records and caches are not part of a rung's difference; neither is the rung's own name, which every copy must change.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Iterator

import yaml

ROOT = Path(__file__).resolve().parents[1]
NOTES = "NOTES.md"
_SKIP_DIRS = {"records", "__pycache__"}


class DiffError(ValueError):
    """The rung, its parent or its notes cannot be read; the message says which."""


@dataclass(frozen=True)
class FileChange:
    """One file that differs: `kind` is added, removed or changed; `plus` and `minus` count lines."""

    name: str
    kind: str
    plus: int
    minus: int
    unified: str


@dataclass(frozen=True)
class RungDiff:
    number: int
    folder: str
    parent: int
    parent_folder: str
    files: tuple[FileChange, ...]

    @property
    def plus(self) -> int:
        return sum(f.plus for f in self.files)

    @property
    def minus(self) -> int:
        return sum(f.minus for f in self.files)


def folder_name(number: int, slug: str) -> str:
    return f"{number:03d}-{slug}"


def rung_files(folder: Path) -> Iterator[Path]:
    """Paths, relative to `folder`, of the files that make up a rung: all but notes, records, caches and dot files."""
    for path in sorted(folder.rglob("*")):
        rel = path.relative_to(folder)
        hidden = any(part.startswith(".") or part in _SKIP_DIRS for part in rel.parts)
        if path.is_file() and not hidden and rel.as_posix() != NOTES and path.suffix != ".pyc":
            yield rel


def rename_pattern(number: int, slug: str) -> re.Pattern[str]:
    """Matches a rung's own name in text: `004-slug`, `rung 4`, `rung 004`, `Rung 4`."""
    return re.compile(rf"(?<![\w-]){number:03d}-{re.escape(slug)}(?![\w-])|(?<=\b[Rr]ung )0*{number}\b")


def read_entries(root: Path = ROOT) -> list[dict]:
    """The rungs of ladder.yaml as plain mappings, in file order."""
    path = root / "ladder.yaml"
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DiffError(f"ladder.yaml: cannot be read ({error.strerror})") from None
    except yaml.YAMLError as error:
        raise DiffError(f"ladder.yaml: not valid YAML: {' '.join(str(error).split())}") from None
    rungs = (data or {}).get("rungs") if isinstance(data, dict) or data is None else None
    return [r for r in rungs or [] if isinstance(r, dict) and "number" in r and "slug" in r]


def find_entry(number: int, root: Path = ROOT) -> dict:
    entries = read_entries(root)
    for entry in entries:
        if entry["number"] == number:
            return entry
    known = ", ".join(str(e["number"]) for e in entries) or "none"
    raise DiffError(f"rung {number}: not in ladder.yaml (rungs there: {known})")


def _lines(path: Path, own_name: re.Pattern[str]) -> list[str] | None:
    """Lines with the rung's own name masked, or None for a file that is not text."""
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        return None
    return own_name.sub("<this rung>", text).splitlines()


def _compare(
    rel: Path, old: Path, new: Path, old_name: re.Pattern[str], new_name: re.Pattern[str]
) -> FileChange | None:
    name = rel.as_posix()
    before = _lines(old / rel, old_name) if (old / rel).is_file() else []
    after = _lines(new / rel, new_name) if (new / rel).is_file() else []
    kind = "added" if not (old / rel).is_file() else "changed" if (new / rel).is_file() else "removed"
    if before is None or after is None:
        if kind == "changed" and (old / rel).read_bytes() == (new / rel).read_bytes():
            return None
        return FileChange(name, kind, 0, 0, f"binary file {name} {kind}\n")
    if kind == "changed" and before == after:
        return None
    text = list(difflib.unified_diff(before, after, f"{old.name}/{name}", f"{new.name}/{name}", lineterm=""))
    plus = sum(line.startswith("+") for line in text[2:])
    minus = sum(line.startswith("-") for line in text[2:])
    return FileChange(name, kind, plus, minus, "\n".join(text) + ("\n" if text else ""))


def rung_diff(number: int, root: Path = ROOT) -> RungDiff:
    """Difference of rung `number` to its parent. Raises DiffError where a rung or a folder is missing."""
    entry = find_entry(number, root)
    parent = find_entry(entry["parent"], root)
    new = root / "ideas" / folder_name(number, entry["slug"])
    old = root / "ideas" / folder_name(parent["number"], parent["slug"])
    for folder in (new, old):
        if not folder.is_dir():
            raise DiffError(f"rung {number}: folder ideas/{folder.name} is missing")
    new_name = rename_pattern(number, entry["slug"])
    old_name = rename_pattern(parent["number"], parent["slug"])
    names = sorted({*rung_files(old), *rung_files(new)}, key=lambda p: p.as_posix())
    changes = (_compare(rel, old, new, old_name, new_name) for rel in names)
    return RungDiff(number, new.name, parent["number"], old.name, tuple(c for c in changes if c is not None))


def listed_files(notes: str) -> list[str] | None:
    """File names in the table under `## What changed` (first column, in backticks); None where there is no table."""
    section = re.search(r"^##\s+What changed\s*$(.*?)(?=^##\s|\Z)", notes, re.M | re.S | re.I)
    if section is None:
        return None
    table = [line.strip() for line in section.group(1).splitlines() if line.strip().startswith("|")]
    if len(table) < 2 or not re.fullmatch(r"[|:\-\s]+", table[1]):
        return None
    names: list[str] = []
    for row in table[2:]:
        names += re.findall(r"`([^`]+)`", row.strip("|").split("|")[0])
    return names


def notes_mismatch(number: int, root: Path = ROOT) -> list[str]:
    """Every way in which the notes' list of changed files differs from the real diff; empty when they agree."""
    diff = rung_diff(number, root)
    if diff.parent == number:
        return []
    path = root / "ideas" / diff.folder / NOTES
    if not path.is_file():
        return [f"ideas/{diff.folder}/{NOTES} is missing"]
    listed = listed_files(path.read_text(encoding="utf-8"))
    if listed is None:
        return [f"{NOTES}: no table of changed files under a heading `## What changed`"]
    real = {f.name: f.kind for f in diff.files}
    wrong = [f"{NOTES} does not list `{name}`, which is {kind}" for name, kind in real.items() if name not in listed]
    wrong += [f"{NOTES} lists `{name}`, which does not differ from the parent" for name in listed if name not in real]
    wrong += [
        f"{NOTES} lists `{name}` {listed.count(name)} times" for name in dict.fromkeys(listed) if listed.count(name) > 1
    ]
    return wrong


def render(diff: RungDiff, unified: bool = False) -> str:
    """Plain text for a terminal: one line per file, and the unified diff of each on request."""
    head = f"{diff.folder} against {diff.parent_folder}: "
    if not diff.files:
        return head + "no difference"
    out = [head + f"{len(diff.files)} file{'s' if len(diff.files) > 1 else ''}, +{diff.plus} -{diff.minus} lines"]
    width = max(len(f.name) for f in diff.files)
    out += [f"  {f.kind:<8} {f.name:<{width}}  +{f.plus} -{f.minus}" for f in diff.files]
    if unified:
        out += ["", *(f.unified for f in diff.files)]
    return "\n".join(out)
