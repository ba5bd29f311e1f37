"""A full disk, a read-only tree, a corrupt record, a truncated object, two runners at once: one clear line, nothing lost."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import subprocess
import sys

import pytest

from ladder import record as records
from tests.faults.conftest import ENV

FULL = 200  # bytes that a file may have: less than any text written here, more than the empty marker files
MAY_WRITE_ANYWHERE = (1, 2, 3)  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, CAP_FOWNER (capabilities(7))
PR_CAPBSET_DROP = 24


def full_disk() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (FULL, FULL))


def unprivileged() -> None:
    """Make root respect permissions from the next exec on."""
    if os.geteuid() == 0:
        for capability in MAY_WRITE_ANYWHERE:
            ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)


def one_line(done: subprocess.CompletedProcess, *words: str) -> None:
    """It failed in one clear line at the end of what it said, without a traceback."""
    assert done.returncode != 0
    assert "Traceback" not in done.stderr, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert all(word in last for word in words), done.stderr


def snapshot(place) -> dict[str, bytes]:
    return {str(p.relative_to(place.root)): p.read_bytes() for p in place.root.rglob("*") if p.is_file() and "__pycache__" not in p.parts}


@pytest.mark.parametrize("name", ["idea", "report"])
def test_full_disk(place, name):
    before = snapshot(place)
    one_line(place.run(name, preexec_fn=full_disk), "File too large")
    assert snapshot(place) == before
    assert place.run(name).returncode == 0
    place.assert_whole()


def test_full_disk_under_check(place):
    """The record cannot be written: one line that names it; no file is left."""
    args = [sys.executable, "-m", "ladder", "check", "1", "--root", str(place.root), "--properties", "notes", "--records", str(place.out)]
    done = subprocess.run(args, env=ENV, capture_output=True, text=True, preexec_fn=full_disk, timeout=300)
    one_line(done, "File too large")
    assert list(place.out.iterdir()) == []


@pytest.mark.parametrize("name", ["idea", "report", "check"])
def test_read_only_tree(place, name):
    before = snapshot(place)
    place.out.mkdir()
    folders = [place.root, *(p for p in place.root.rglob("*") if p.is_dir())]
    for folder in folders:
        folder.chmod(0o555)
    try:
        done = place.run(name, preexec_fn=unprivileged)
    finally:
        for folder in folders:
            folder.chmod(0o755)
    one_line(done, "Permission denied")
    assert snapshot(place) == before


def test_corrupt_records_are_named_and_kept(place):
    """The report goes on without them, and says which they are."""
    folder = place.record.parent
    (folder / "check-half.json").write_text(place.record.read_text()[:100])
    (folder / "check-empty.json").write_text("")
    (folder / "check-other.json").write_bytes(b"\xff\xfe\x00")
    done = subprocess.run([sys.executable, "-m", "ladder", "report", "--json", "--root", str(place.root)], env=ENV, capture_output=True, text=True)
    assert done.returncode == 0 and json.loads(done.stdout) == []
    said = [line for line in done.stderr.splitlines() if "corrupt record" in line]
    assert len(said) == 3 and all(f"check-{kind}.json" in done.stderr for kind in ("half", "empty", "other"))
    assert len(list(folder.glob("*.json"))) == 4
    assert place.run("report").returncode == 0
    assert len(list(folder.glob("*.json"))) == 4


@pytest.mark.parametrize("name", ["check", "bench"])
def test_two_runners_at_once_write_two_records(place, name):
    runs = [place.start(name) for _ in range(2)]
    for run in runs:
        out, err = run.communicate(timeout=300)
        assert run.returncode == 0, err
    read, problems = records.read_all(place.out)
    assert problems == [] and len(read) == 2 and all(r["complete"] for r in read)
    assert [p.name for p in place.out.iterdir() if p.suffix != ".json"] == []


def test_two_records_of_one_second(place):
    """Both runners have chosen the same name before either writes."""
    record = records.read(place.record)
    first = second = records.path_for(place.out, record)
    assert records.create(first, record) == first
    other = records.create(second, {**record, "dirty": "the other"})
    assert other != first and other.parent == place.out
    assert records.read(first)["dirty"] != "the other" and records.read(other)["dirty"] == "the other"


def test_two_ideas_at_once(place):
    runs = [place.start("idea") for _ in range(2)]
    for run in runs:
        out, err = run.communicate(timeout=300)
        assert run.returncode == 0, err
    assert sorted(p.name for p in (place.root / "ideas").iterdir()) == ["001-one", "002-idea-1", "003-idea-2"] or \
        sorted(p.name for p in (place.root / "ideas").iterdir()) == ["001-one", "002-idea-2", "003-idea-1"]
    place.assert_whole()


def test_a_readme_with_a_broken_marker_is_one_line(place):
    readme = place.root / "README.md"
    readme.write_text(readme.read_text().replace("<!-- /ladder:rungs -->", ""))
    before = readme.read_text()
    one_line(place.run("report"), "ladder:rungs")
    assert readme.read_text() == before
