"""Generated problems: a right rung survives them, and a wrong one yields a command that shows the failure again."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys

import pytest

from kernels.kda.inputs import fresh_seed
from tests.faults.conftest import ENV, PROJECT
from tests.hostile import search


def folder(forge, *edits):
    number = forge.rung("rung", *edits)
    ladder = forge.ladder()
    return ladder.folder(ladder.rung(number))


def test_right_rung_survives(forge):
    ctx = search.context(folder(forge), "cpu", "native", fresh_seed())
    search.search(ctx, 1, examples=60, longest=140)


def test_failure_is_small_and_replays(forge):
    """A tail of the sequence that is wrong only beyond a chunk: the shortest such problem, and the command for it."""
    wrong = ('    return {"o": o, "final_state": S}\n',
             '    if p.T > 64 and p.HV > p.H:\n        o[:, 64:] *= 1.5\n    return {"o": o, "final_state": S}\n')  # fmt: skip
    ctx = search.context(folder(forge, wrong), "cpu", "native", 11)
    with pytest.raises(AssertionError) as error:
        search.search(ctx, 1, examples=200, longest=140)
    command = re.search(r"replay: (.*)", str(error.value)).group(1)
    assert re.search(r"T=(6[5-9]|[78]\d)\b", command) and "HV=" in command, "not shrunk"
    args = [sys.executable if word == "python" else word for word in shlex.split(command)]
    done = subprocess.run([*args, "--root", str(forge.root), "--json"], env=ENV, capture_output=True, text=True, timeout=300)
    (row,) = json.loads(done.stdout)
    assert done.returncode == 1 and row["outcome"] == "failed" and "o: row error" in row["reason"]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_rungs_survive_in_the_emulator(number, arch):
    done = subprocess.run([sys.executable, "-m", "tests.hostile.search", str(number), arch, "20"], env=ENV, cwd=PROJECT,
                          capture_output=True, text=True, timeout=3500)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
