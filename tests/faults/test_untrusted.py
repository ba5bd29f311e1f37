"""Whatever a rung does to its process is that rung's verdict: the runner goes on to the next one."""

from __future__ import annotations

import os
import re
import signal
from multiprocessing import forkserver

import pytest

from ladder import manifest
from ladder.check import Options, Run
from ladder.worker import Assignment, Worker

BODY = "    io = p.io_dtype\n"
UNITS = "UNITS = ()\n"
HANGS_S, SLOW_S = 8.0, 60.0  # a process begins and answers in a third of a second, on a busy machine in several times that
# what the rung does -> what its rows say
IN_A_CALL = {
    "import os; os._exit(7)": r"the rung's process died \(exit code 7\)",
    "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)": r"the rung's process died \(killed by SIGSEGV\)",
    "import ctypes; ctypes.string_at(8)": r"the rung's process died \(killed by SIGSEGV\)",
    "import sys; sys.exit(3)": r"process died \(exit code 3\)|SystemExit",
    "raise KeyboardInterrupt": r"process died|KeyboardInterrupt",
    "import os; os.closerange(3, 256); os._exit(0)": r"the rung's process died \(exit code 0\)",
    "while True: pass": r"hangs: no answer within 8 s",
    "import time; time.sleep(1000)": r"hangs: no answer within 8 s",
    "import signal, time; [signal.signal(s, signal.SIG_IGN) for s in (2, 15)]; time.sleep(1000)": r"hangs: no answer within 8 s",
    "KEPT.append(bytearray(b'x') * (2 << 30)); import time; time.sleep(1000)": r"uses \d\.\d GiB of memory, accepted: 1.0 GiB|MemoryError",
    "import os; [os.write(1, b'noise' * 1000) for _ in range(100)]; raise ValueError('after the noise')": r"ValueError: after the noise",
    "raise RecursionError('line one\\nline two')": r"RecursionError: line one line two",
    "import os, signal; os.kill(os.getppid(), signal.SIGKILL)": r"^$|died",
}  # fmt: skip
ON_IMPORT = {
    "import os; os._exit(7)": r"the rung's process died \(exit code 7\)",
    "while True: pass": r"hangs: no answer within 8 s",
    "import sys; sys.exit(3)": r"process died|SystemExit",
    "raise ValueError('no such tile')": r"kernel.py cannot be imported: ValueError: no such tile",
    "import nowhere_to_be_found": r"kernel.py cannot be imported: ModuleNotFoundError: No module named 'nowhere_to_be_found'",
    "def broken(:": r"kernel.py cannot be imported: SyntaxError",
}  # fmt: skip


def verdicts(ladder: manifest.Ladder, properties: list[str], expected: str = "") -> dict[int, list[dict]]:
    """Rows by rung; waits no longer than it must where `expected` says that one hangs."""
    seconds = HANGS_S if expected.startswith("hangs") else SLOW_S
    options = Options(properties=properties, cases=["short"], device="cpu", seed=7, time_limit_s=seconds, memory_limit=1 << 30, jobs=1)
    rows = Run(ladder, list(ladder.rungs), options).execute()
    return {number: [row for row in rows if row["rung"] == number] for number in ladder.rungs}


@pytest.mark.parametrize("act", IN_A_CALL)
def test_in_a_call(forge, act):
    forge.rung("bad", (BODY, BODY + f"    {act}\n"), (UNITS, UNITS + "KEPT = []\n"))
    forge.rung("good")
    rows = verdicts(forge.ladder(), ["inputs untouched"], IN_A_CALL[act])
    assert [row["outcome"] for row in rows[2]] == ["passed"], rows[2]
    (bad,) = rows[1]
    if "getppid" not in act:  # what starts the processes dies, and is started again: the rung itself has done its work
        assert bad["outcome"] == "failed"
    assert re.search(IN_A_CALL[act], bad["reason"]), bad["reason"]
    assert "\n" not in bad["reason"]


@pytest.mark.parametrize("act", ON_IMPORT)
def test_on_import(forge, act):
    forge.rung("bad", (UNITS, UNITS + act + "\n"))
    forge.rung("good")
    rows = verdicts(forge.ladder(), ["inputs untouched"], ON_IMPORT[act])
    assert [row["outcome"] for row in rows[2]] == ["passed"], rows[2]
    (bad,) = rows[1]
    assert bad["outcome"] == "failed" and re.search(ON_IMPORT[act], bad["reason"]), bad["reason"]


def test_a_rung_that_keeps_dying_is_given_up(forge):
    forge.rung("bad", (BODY, BODY + "    import os; os._exit(7)\n"))
    rows = verdicts(forge.ladder(), ["inputs untouched", "causality", "reruns bitwise equal", "two halves", "refusals"])[1]
    assert [row["outcome"] for row in rows] == ["failed"] * 3 + ["not run"] * 2 or \
        sorted(row["outcome"] for row in rows) == ["failed"] * 3 + ["not run"] * 2
    assert rows[-1]["reason"] == "the rung's process died 3 times before"


def test_the_process_that_starts_the_others_may_be_dying(forge):
    """SIGKILL takes a moment, and until then the old one is still asked to start the next."""
    forge.rung("good")
    ladder = forge.ladder()
    assignment = Assignment(ladder.folder(ladder.rungs[1]), "cpu", "native", 7, ladder.cells(gpu=False)[0], str(forge.root))
    for _ in range(2):
        worker = Worker(assignment, time_limit_s=60.0, memory_limit=4 << 30)
        worker._start()
        os.kill(forkserver._forkserver._forkserver_pid, signal.SIGKILL)
        after = Worker(assignment, time_limit_s=60.0, memory_limit=4 << 30)
        after._start()
        assert after._process.is_alive()
        worker.stop()
        after.stop()
