"""Start a new rung: copy an existing one to the next number, ready to be changed.

A kill at any point leaves either the finished rung or something the next call cleans up: the folder is built under a
hidden name, renamed into place with a marker inside, ladder.yaml is replaced last, and the marker goes after that. A
folder that carries the marker but has no entry in ladder.yaml was never finished.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import yaml

from .diff import DiffError, ROOT, folder_name, read_entries, rename_pattern, rung_files
from .files import locked

MARKER = ".unfinished"
_TEMP = ".new-"
_FRESH = ".ladder.yaml.new"
_SLUG = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
_SLUG_MAX = 40
_OWN_KEYS = ("number", "slug", "parent", "idea", "status", "reason")

NOTES_TEMPLATE = """\
# {name}

Parent: `{parent}`

One line: what this rung tries.

## What changed

| file | change |
|---|---|

List every file that differs from the parent (`python -m ladder diff {number}`), one row each, its name in backticks.

## Why it should be faster

The arithmetic: bytes over the measured copy rate, flops over the peak, or steps of the serial chain times their
latency; for the parent and for this rung.

## Prediction

| cell | parent ms | predicted ms | why |
|---|---|---|---|

## Result

Not measured yet.

## What was learned

Nothing yet.
"""


class ScaffoldError(ValueError):
    """The new rung is refused; the message names the argument, what was given and what is accepted."""


def _clean_leftovers(ideas: Path, listed: set[str]) -> None:
    """Remove what a killed call left; a folder edited since is kept and named, never deleted."""
    for folder in sorted(ideas.iterdir()):
        if folder.name.startswith(_TEMP):
            shutil.rmtree(folder)
            continue
        marker = folder / MARKER
        if not marker.is_file():
            continue
        if folder.name in listed:
            marker.unlink()
            continue
        made = marker.stat().st_mtime_ns
        if any(f.stat().st_mtime_ns > made for f in folder.rglob("*") if f.is_file()):
            raise ScaffoldError(
                f"ideas/{folder.name}: left half-made by an earlier call and edited since; "
                f"add it to ladder.yaml and delete its {MARKER}, or remove the folder"
            )
        doomed = ideas / f"{_TEMP}{folder.name}"
        os.rename(folder, doomed)  # a kill during the removal then leaves a hidden name, not half a rung
        shutil.rmtree(doomed)


def _taken_numbers(ideas: Path) -> set[int]:
    return {int(m.group(1)) for f in ideas.iterdir() if (m := re.match(r"(\d{3,})-", f.name))}


def _check_slug(name: str, entries: list[dict], ideas: Path) -> None:
    if not isinstance(name, str) or not _SLUG.fullmatch(name) or len(name) > _SLUG_MAX:
        raise ScaffoldError(
            f"name: {name!r} given; accepted: lower-case letters, digits and single dashes between them, "
            f"at most {_SLUG_MAX} characters (example: wider-tiles)"
        )
    for entry in entries:
        if entry["slug"] == name:
            raise ScaffoldError(f"name: {name!r} is taken by rung {entry['number']}; choose another")
    for folder in ideas.iterdir():
        if re.fullmatch(rf"\d+-{re.escape(name)}", folder.name):
            raise ScaffoldError(f"name: {name!r} is taken by the folder ideas/{folder.name}; choose another")


def _copy(source: Path, target: Path, old: re.Pattern[str], number: int, name: str) -> None:
    """Copy a rung's files with its own name replaced in their text; modes are kept."""

    def renamed(match: re.Match[str]) -> str:
        text = match.group(0)
        if "-" in text:
            return name
        return f"{number:0{len(text)}d}"

    for rel in rung_files(source):
        (target / rel).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source / rel, target / rel)
        try:
            text = (source / rel).read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            continue
        changed = old.sub(renamed, text)
        if changed != text:
            (target / rel).write_bytes(changed.encode("utf-8"))


def _last_line(node: yaml.Node) -> int:
    """Index of the last line a node's text stands on (a block mapping's own end mark is past comments that follow)."""
    if isinstance(node, yaml.ScalarNode):
        end = node.end_mark
        block = node.style in ("|", ">")
        return end.line - 1 if block and end.column == 0 else end.line
    if node.flow_style or not node.value:
        return node.end_mark.line
    children = [n for pair in node.value for n in pair] if isinstance(node, yaml.MappingNode) else node.value
    return max(_last_line(child) for child in children)


def append_rung(text: str, entry: dict) -> str:
    """ladder.yaml's text with one more entry at the end of `rungs`; every other line, comments included, unchanged."""
    document = yaml.compose(text)
    rungs = (
        next((v for k, v in document.value if k.value == "rungs"), None)
        if isinstance(document, yaml.MappingNode)
        else None
    )
    if not isinstance(rungs, yaml.SequenceNode) or rungs.flow_style or not rungs.value:
        raise ScaffoldError("ladder.yaml: `rungs` must be a block list (one `- ` per rung) with at least one entry")
    indent = " " * rungs.start_mark.column
    body = yaml.safe_dump(entry, sort_keys=False, default_flow_style=None, allow_unicode=True, width=100).splitlines()
    new = [indent + ("- " if i == 0 else "  ") + line for i, line in enumerate(body)]
    lines = text.splitlines()
    at = _last_line(rungs.value[-1]) + 1
    while at > 1 and not lines[at - 1].strip():
        at -= 1
    spaced = len(rungs.value) > 1 and not lines[rungs.value[-1].start_mark.line - 1].strip()
    result = "\n".join(lines[:at] + ([""] if spaced else []) + new + lines[at:]) + "\n"
    before, after = yaml.safe_load(text), yaml.safe_load(result)
    before["rungs"].append(entry)
    if after != before:
        raise ScaffoldError("ladder.yaml: cannot be extended without changing another entry; add the rung by hand")
    return result


def _build(folder: Path, source: Path, parent: dict, number: int, name: str, manifest: str) -> None:
    folder.mkdir()
    _copy(source, folder, rename_pattern(parent["number"], parent["slug"]), number, name)
    (folder / "records").mkdir()
    (folder / "records" / ".gitkeep").touch()  # git keeps no empty folder
    notes = NOTES_TEMPLATE.format(name=name, parent=source.name, number=number)
    (folder / "NOTES.md").write_text(notes, encoding="utf-8")
    (folder / _FRESH).write_text(manifest, encoding="utf-8")
    (folder / MARKER).touch()  # last: anything newer than it was edited by hand


def idea(frm: int, name: str, root: Path = ROOT) -> Path:
    """Copy rung `frm` to the next number under the slug `name`; returns the new folder.

    Raises ScaffoldError for a missing parent, a bad or taken name, or a ladder.yaml that cannot be extended; nothing
    is left behind then.
    """
    ideas = root / "ideas"
    if not ideas.is_dir():
        raise ScaffoldError(f"ideas: no such folder in {root}")
    with locked(ideas):  # two at once would take the same number
        try:
            entries = read_entries(root)
        except DiffError as error:
            raise ScaffoldError(str(error)) from None
        _clean_leftovers(ideas, {folder_name(e["number"], e["slug"]) for e in entries})
        _check_slug(name, entries, ideas)
        parent = next((e for e in entries if e["number"] == frm), None)
        if parent is None:
            known = ", ".join(str(e["number"]) for e in entries) or "none"
            raise ScaffoldError(f"from: no rung {frm} in ladder.yaml (rungs there: {known})")
        source = ideas / folder_name(parent["number"], parent["slug"])
        if not source.is_dir():
            raise ScaffoldError(f"from: rung {frm} has no folder ideas/{source.name}")
        number = max({e["number"] for e in entries} | _taken_numbers(ideas)) + 1
        return _make(root, source, parent, number, name)


def _make(root: Path, source: Path, parent: dict, number: int, slug: str) -> Path:
    ideas, manifest = root / "ideas", root / "ladder.yaml"
    final = ideas / folder_name(number, slug)
    entry = {
        "number": number,
        "slug": slug,
        "parent": parent["number"],
        "idea": f"copy of {source.name}, not changed yet",
        "status": "draft",
    }
    entry |= {key: value for key, value in parent.items() if key not in _OWN_KEYS}
    text = append_rung(manifest.read_text(encoding="utf-8"), entry)
    build = ideas / f"{_TEMP}{final.name}"
    try:
        _build(build, source, parent, number, final.name, text)
        shutil.copymode(manifest, build / _FRESH)
        os.rename(build, final)
        os.replace(final / _FRESH, manifest)  # the commit point
    except BaseException:
        if not (final.is_dir() and manifest.read_text(encoding="utf-8") == text):
            shutil.rmtree(build, ignore_errors=True)
            shutil.rmtree(final, ignore_errors=True)  # ours: the number was free and we hold the lock
            raise
        (final / MARKER).unlink(missing_ok=True)
        raise
    (final / MARKER).unlink()
    return final
