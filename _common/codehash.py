"""Which project files a piece of code is made of, and their hash.

Read from the source text, so that nothing is imported. A file belongs to the code if it is one of the entry files or
is imported, directly or not, from `kernels`, `_common` or the importing file's own folder.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SHARED = ("kernels", "_common")


def sources(entries: Iterable[Path], root: Path = ROOT) -> list[Path]:
    """The entry files and every project file that they import, sorted by path relative to `root`."""
    pending, seen = [Path(e).resolve() for e in entries], set()
    while pending:
        path = pending.pop()
        if path not in seen:
            seen.add(path)
            pending += _imports(path, root)
    return sorted(seen)


def file_hash(entries: Iterable[Path], *salt: str, root: Path = ROOT) -> str:
    """Hex digest over names and contents of `sources(entries)` and the `salt` strings."""
    digest = hashlib.sha256()
    for path in sources(entries, root):
        name = path.relative_to(root) if path.is_relative_to(root) else path.name
        digest.update(f"{name}\0".encode() + path.read_bytes() + b"\0")
    for text in salt:
        digest.update(text.encode() + b"\0")
    return digest.hexdigest()


def code_hash(rung_dir: Path, parent_hash: str, timing_version: str, root: Path = ROOT) -> str:
    """The hash under which a rung's numbers are quotable: every project file that its kernels are made of, the
    parent's hash ("" for a rung that is its own parent) and the version of the timing method. Notes, records, rivals
    and report code do not count."""
    return file_hash(sorted(rung_dir.glob("*.py")), parent_hash, timing_version, root=root)[:16]


def _imports(path: Path, root: Path) -> list[Path]:
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            names = [base, *(f"{base}{'' if base.endswith('.') else '.'}{alias.name}" for alias in node.names)]
        else:
            continue
        for name in names:
            found += _resolve(name, path, root)
    return found


def _resolve(name: str, importer: Path, root: Path) -> list[Path]:
    level = len(name) - len(name.lstrip("."))
    parts = name.lstrip(".").split(".") if name.strip(".") else []
    if level:
        base = importer.parents[level - 1]
    elif parts and parts[0] in SHARED:
        base = root
    else:
        base = importer.parent  # a sibling, if there is one of that name
    found = [base.joinpath(*parts[:n], "__init__.py") for n in range(1, len(parts) + 1)]
    found.append(base.joinpath(*parts).with_suffix(".py") if parts else base / "__init__.py")
    return [p.resolve() for p in found if p.is_file()]
