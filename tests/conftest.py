"""One thread per process: the CPU time of a thread then tells what its code does, and processes do not crowd each other.

`--record FILE` keeps what came of each test, with the device, versions, commit and code hash, in a JSON file that is
replaced after every test: a run that is cut short leaves what it had.
"""

import json
import os
from datetime import datetime, timezone
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before anything imports torch
ROOT = Path(__file__).parent.parent
CODE = ("_common", "emulator", "ideas", "kernels", "ladder", "tests")


def pytest_addoption(parser):
    parser.addoption("--record", metavar="FILE", help="write the outcome of every test to this JSON file")


def pytest_configure(config):
    file = config.getoption("--record")
    if file and not hasattr(config, "workerinput"):  # of several processes, the one that hears from all
        config.pluginmanager.register(Recorder(Path(file).absolute()))


class Recorder:
    """Outcomes by test: "passed", "failed", "skipped" (which here means refused or inherited, the reason says which)."""

    def __init__(self, path: Path) -> None:
        import torch

        from _common.codehash import file_hash
        from ladder import record, timing

        commit, dirty = record.git_state(ROOT)
        device = timing.describe_device(torch.device("cuda")) if torch.cuda.is_available() else {"name": "cpu"}
        code = [file for folder in CODE for file in (ROOT / folder).rglob("*.py")]
        self.path = path
        self.kept = {
            "kind": "tests", "date": datetime.now(timezone.utc).isoformat(timespec="seconds"), "device": device, "versions": record.versions(),
            "commit": commit, "dirty": dirty, "code_hash": file_hash(code)[:16], "complete": False, "outcomes": {},
        }  # fmt: skip

    def pytest_runtest_logreport(self, report):
        if report.when != "call" and report.passed:
            return
        reason = report.longrepr[2] if report.skipped else str(report.longrepr).splitlines()[-1] if report.failed else ""
        self.kept["outcomes"][report.nodeid] = {"outcome": report.outcome, "seconds": round(report.duration, 2), "reason": reason}
        self._write()

    def pytest_sessionfinish(self, session):
        self.kept["complete"] = session.testscollected == len(self.kept["outcomes"])
        self._write()

    def _write(self):
        from ladder.files import replace_text

        replace_text(self.path, json.dumps(self.kept, indent=1) + "\n")
