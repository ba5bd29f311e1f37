"""Killed at any moment: nothing is half-written, no lock and no process is left, and the next run works."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time

import pytest
import torch

from ladder import files, judge, manifest, report_readme
from ladder import record as records
from tests.faults.conftest import ENV

COMMANDS = ("check", "bench", "idea", "report")


def running(leader: int) -> list[str]:
    done = subprocess.run(["ps", "-o", "pid=,stat=,args=", "-s", str(leader)], capture_output=True, text=True)
    return [line for line in done.stdout.splitlines() if line.split()[1][0] != "Z"]


def kill_once(place, name: str, after: float) -> None:
    """Start, wait, SIGKILL the leader alone (what the kernel's memory killer does), and see what is left."""
    process = place.start(name)
    try:
        process.wait(after)
    except subprocess.TimeoutExpired:
        process.kill()
    process.communicate()
    place.assert_whole()
    deadline = time.monotonic() + 30
    while (left := running(process.pid)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == [], f"{name} killed after {after:.2f} s leaves {left}"


def kills(place, count: int, seed: int) -> None:
    """`count` kills spread over the commands and over the time that each takes undisturbed; then each runs to its end."""
    dice = random.Random(seed)
    took = {}
    for name in COMMANDS:
        began = time.monotonic()
        done = place.run(name)
        took[name] = time.monotonic() - began
        assert done.returncode == 0, done.stderr
    for n in range(count):
        name = COMMANDS[n % len(COMMANDS)]
        kill_once(place, name, dice.uniform(0.0, 1.1 * took[name]))
    for name in COMMANDS:
        done = place.run(name)
        assert done.returncode == 0, f"{name} after {count} kills (seed {seed}): {done.stderr}"
    place.assert_whole()


def die_at_line(watched, step: int, call) -> bool:
    """Run `call` in a child that dies at the step-th line it executes in `watched`, a file or the code of one function, or
    in `ladder.files`; whether it did."""
    pid = os.fork()
    if pid == 0:
        left = iter(range(step - 1, -1, -1))

        def trace(frame, event, arg):
            if not {frame.f_code, frame.f_code.co_filename} & {watched, files.__file__}:
                return None
            if event == "line" and next(left) == 0:
                os._exit(9)
            return trace

        sys.settrace(trace)
        try:
            call()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9


def test_a_record_is_whole_at_every_line_of_its_writing(place):
    """Replaced, or created anew: a reader finds the old one, the new one or none."""
    old = records.read(place.record)
    new, fresh, step = {**old, "command": "x" * 100_000}, place.out / "check-20260101T000000Z-11111111.json", 1
    outcomes = set()
    while True:
        died = die_at_line(records.__file__, step, lambda: (records.write(place.record, new), records.create(fresh, new)))
        assert records.read(place.record) in (old, new)
        made = [records.read(path) for path in place.out.glob("*.json")]
        assert made in ([], [new])
        outcomes.add((records.read(place.record) == new, len(made)))
        if not died:
            break
        records.write(place.record, old)
        fresh.unlink(missing_ok=True)
        step += 1
    assert step > 20 and outcomes == {(False, 0), (True, 0), (True, 1)}


def test_a_readme_is_whole_at_every_line_of_its_writing(place):
    readme, step, outcomes = place.root / "README.md", 1, set()
    old, ladder = readme.read_text(), manifest.load(place.root)
    new = report_readme.refreshed(old, ladder)
    assert new != old
    while True:
        died = die_at_line(report_readme.write.__code__, step, lambda: report_readme.write(readme, ladder))
        assert readme.read_text() in (old, new)
        outcomes.add(readme.read_text() == new)
        if not died:
            break
        readme.write_text(old)
        step += 1
    assert step > 10 and outcomes == {False, True}


def test_eight_kills(place):
    kills(place, 8, random.randrange(1 << 30))


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_a_hundred_kills(place):
    kills(place, 100, random.randrange(1 << 30))


def test_a_hanging_rung_ends_with_its_killed_runner(place):
    place.forge.rung("hangs", ("    io = p.io_dtype\n", "    io = p.io_dtype\n    while True: pass\n"))
    process = subprocess.Popen([sys.executable, "-m", "ladder", "check", "2", "--root", str(place.root), "--properties", "causality"],
                               start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=ENV)  # fmt: skip
    deadline = time.monotonic() + 120
    while not (hanging := busy(process.pid)) and time.monotonic() < deadline:
        time.sleep(0.5)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    while (left := running(process.pid)) and time.monotonic() < deadline + 30:
        time.sleep(0.2)
    for line in left:
        os.kill(int(line.split()[0]), signal.SIGKILL)
    assert hanging and left == []


def busy(leader: int) -> bool:
    """Whether a process of the session, not its leader, is spinning."""
    done = subprocess.run(["ps", "-o", "pid=,stat=,cputimes=", "-s", str(leader)], capture_output=True, text=True)
    lines = [line.split() for line in done.stdout.splitlines()]
    return any(int(pid) != leader and stat.startswith("R") and int(seconds) >= 2 for pid, stat, seconds in lines)


def test_shared_memory_of_a_killed_runner_is_swept(tmp_path, monkeypatch):
    """The judge's exchange folder of a killed runner goes with the next run; a living runner's stays."""
    monkeypatch.setattr(judge, "_roomy", lambda: str(tmp_path))
    killed = tmp_path / f"{judge.PREFIX}killed"
    killed.mkdir()
    (killed / "parcel").write_bytes(b"x" * 4096)
    first = judge.Judge(torch.device("cpu"))
    second = judge.Judge(torch.device("cpu"))
    assert not killed.exists() and os.path.isdir(first.folder.name) and os.path.isdir(second.folder.name)
    first.close()
    second.close()
    assert list(tmp_path.iterdir()) == []


def test_runners_that_start_at_once_leave_each_other_alone(tmp_path, monkeypatch):
    """No judge's sweep takes a folder that another has made and not yet held."""
    monkeypatch.setattr(judge, "_roomy", lambda: str(tmp_path))
    fork = multiprocessing.get_context("fork")
    start = fork.Barrier(2)

    def judges():
        for _ in range(300):
            start.wait(60)
            judge.Judge(torch.device("cpu")).close()

    runners = [fork.Process(target=judges) for _ in range(2)]
    for runner in runners:
        runner.start()
    for runner in runners:
        runner.join(100)
    assert [runner.exitcode for runner in runners] == [0, 0]
