"""The command line: rows for scripts on standard output, one clear line for a mistake."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ladder import record as records
from ladder.cli import main

PROJECT = Path(__file__).resolve().parents[2]
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(PROJECT)}


def ladder(*args, **kw):
    return subprocess.run([sys.executable, "-m", "ladder", *map(str, args)], capture_output=True, text=True, env=ENV, timeout=300, **kw)


def test_check_json_and_record(forge, tmp_path):
    right = forge.rung("right")
    wrong = forge.rung("wrong", ('    return {"o": o, "final_state": S}\n', '    return {"o": o * 2, "final_state": S}\n'), parent=right)
    done = ladder("check", right, wrong, "--root", forge.root, "--cases", "short", "--properties", "oracle,notes,refusals",
                  "--json", "--seed", 4, "--records", tmp_path / "out")  # fmt: skip
    assert done.returncode == 1, done.stderr
    rows = json.loads(done.stdout)
    assert {tuple(row) for row in rows} == {
        ("rung", "name", "arch", "property", "outcome", "reason", "case", "regime", "form", "seed")}  # fmt: skip
    got = {(row["rung"], row["arch"], row["property"]): row["outcome"] for row in rows}
    assert got == {(1, "-", "notes"): "passed", (2, "-", "notes"): "passed", (1, "cpu", "oracle"): "passed",
                   (2, "cpu", "oracle"): "failed", (1, "cpu", "refusals"): "passed", (2, "cpu", "refusals"): "passed"}  # fmt: skip
    assert "seed 4 (replay with --seed 4)" in done.stderr
    read, problems = records.read_all(tmp_path / "out", "check")
    assert problems == [] and sorted(r["number"] for r in read) == [1, 2] and all(r["complete"] for r in read)
    assert [row for r in read for row in r["rows"] if row["outcome"] == "failed"] == [row for row in rows if row["outcome"] == "failed"]


@pytest.mark.parametrize(("args", "message"), [
    (("check", 9), "rung 9: not in ladder.yaml, accepted: 1"),
    (("check", 1, "--cases", "huge"), "cases: given huge, accepted: tiny, short"),
    (("check", 1, "--properties", "speed"), "properties: given speed, accepted: notes, oracle"),
    (("check", 1, "--archs", "sm_90a"), "archs: given sm_90a, accepted: those that the rungs claim"),
    (("check", 1, "--device", "tpu"), "device: given tpu, accepted: auto, cpu, cuda"),
    (("diff", 9), "rung 9: not in ladder.yaml"),
    (("idea", 1, "Bad Name"), "name: 'Bad Name' given; accepted: lower-case"),
])  # fmt: skip
def test_mistakes_are_one_line(forge, args, message, monkeypatch, capsys):
    forge.rung("one")
    monkeypatch.setattr(sys, "argv", ["ladder", *map(str, args), "--root", str(forge.root)])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2 and message in capsys.readouterr().err


def test_bench_without_a_gpu_says_so(forge):
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    forge.rung("one")
    done = ladder("bench", 1, "--root", forge.root)
    assert done.returncode == 2 and "bench: no GPU is visible here" in done.stderr and "Traceback" not in done.stderr


def heeds_interrupts():
    """A shell starts background jobs with SIGINT ignored, and children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_interrupted_check_keeps_its_rows(forge, tmp_path):
    """Ctrl-C while the second rung hangs: the first one's rows are kept, no verdict is made up, no process is left."""
    forge.rung("right")
    forge.rung("hangs", ("    io = p.io_dtype\n", "    io = p.io_dtype\n    while True: pass\n"), parent=1)
    process = subprocess.Popen(
        [sys.executable, "-m", "ladder", "check", "1", "2", "--root", str(forge.root), "--cases", "short", "--properties",
         "oracle,refusals", "--records", str(tmp_path / "out")], env=ENV, stderr=subprocess.PIPE, text=True, start_new_session=True,
        preexec_fn=heeds_interrupts)  # fmt: skip
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        read, _ = records.read_all(tmp_path / "out") if (tmp_path / "out").is_dir() else ([], [])
        if any(len(r["rows"]) == 2 for r in read):
            break
        time.sleep(0.1)
    time.sleep(1)
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert "interrupted: 2 rows decided, kept in" in said and "Traceback" not in said
    read, _ = records.read_all(tmp_path / "out")
    assert [(r["number"], len(r["rows"])) for r in read] == [(1, 2)]
    deadline = time.monotonic() + 20
    while (left := _session(process.pid)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert left == []


def _session(leader):
    """Processes of a session that still run."""
    done = subprocess.run(["ps", "-o", "pid=,stat=,args=", "-s", str(leader)], capture_output=True, text=True)
    return [line for line in done.stdout.splitlines() if line.split()[1][0] != "Z"]


@pytest.mark.slow
def test_build_reads_registers_of_the_baseline():
    done = ladder("build", 1, "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    for arch in ("sm_90a", "sm_100a"):
        mine = {row["kernel"]: row for row in rows if row["arch"] == arch}
        assert 30 < mine["chunk_gla_fwd_kernel_o"]["registers"] <= 255
        assert mine["chunk_gated_delta_rule_fwd_kernel_h_blockdim64"]["shared"] > 0
        assert len(mine) >= 9
