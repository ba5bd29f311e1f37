"""A small ladder with a README and a record, and commands on it in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ladder import manifest
from ladder import record as records
from tests.runner.conftest import Forge

PROJECT = Path(__file__).resolve().parents[2]
# No bytecode: on a disk that is full for one process only it would be cut off in the project's own __pycache__, unreadable from then on.
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(PROJECT), "PYTHONDONTWRITEBYTECODE": "1"}
README = "# A ladder\n\n<!-- ladder:rungs -->\n<!-- /ladder:rungs -->\n\nThe end.\n"


class Place:
    """A ladder in a folder. commands: what is killed, as arguments of `python`; state(): what may never be half-written."""

    def __init__(self, root: Path) -> None:
        self.root, self.out = root, root / "out"
        self.forge = Forge(root)
        self.forge.rung("one")
        (root / "README.md").write_text(README)
        ladder = manifest.load(root)
        record = records.new("check", ladder, ladder.rung(1), {"name": "host", "arch": "cpu"}, rows=[
            {"rung": 1, "arch": "cpu", "property": "oracle", "outcome": "passed", "reason": "", "case": None, "regime": None,
             "form": None}])  # fmt: skip
        self.record = root / "ideas" / "001-one" / "records" / "check-20260101T000000Z-00000000.json"
        records.write(self.record, record)
        self.ideas = 0

    def command(self, name: str) -> list[str]:
        root = ("--root", str(self.root))
        self.ideas += name == "idea"
        return {
            "check": ["-m", "ladder", "check", "1", *root, "--cases", "short", "--properties", "oracle,notes,refusals,causality",
                      "--records", str(self.out)],
            "bench": [str(PROJECT / "tests" / "faults" / "bench_run.py"), str(self.root), str(self.out)],
            "idea": ["-m", "ladder", "idea", "1", f"idea-{self.ideas}", *root],
            "report": ["-m", "ladder", "report", "--write", *root],
        }[name]  # fmt: skip

    def start(self, name: str, **kw: object) -> subprocess.Popen:
        return subprocess.Popen([sys.executable, *self.command(name)], env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                text=True, start_new_session=True, **kw)  # fmt: skip

    def run(self, name: str, **kw: object) -> subprocess.CompletedProcess:
        return subprocess.run([sys.executable, *self.command(name)], env=ENV, capture_output=True, text=True, timeout=300, **kw)

    def assert_whole(self) -> None:
        """Nothing that a reader sees is half-written."""
        ladder = manifest.load(self.root)
        for number in ladder.rungs:
            folder = ladder.folder(ladder.rung(number))
            assert (folder / "kernel.py").is_file() and (folder / "NOTES.md").is_file()
        assert json.loads(self.record.read_text())["rows"]
        for folder in [self.out, *(self.root / "ideas").glob("*/records")]:
            for path in folder.glob("*.json"):
                records.read(path)
        text = (self.root / "README.md").read_text()
        assert text.startswith("# A ladder\n") and text.endswith("The end.\n") and text.count("ladder:rungs") == 2


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.fixture
def forge(tmp_path: Path) -> Forge:
    return Forge(tmp_path)
