import dataclasses
import json
import subprocess
import sys

import pytest
import torch

from ladder import doctor
from ladder.doctor import Finding


@pytest.fixture
def found():
    return {f.name: f for f in doctor.findings()}


def test_parts_are_this_machines(found):
    assert found["Python"].ok and found["Python"].detail.startswith(sys.version.split()[0])
    assert found["torch"].detail.startswith(torch.__version__)
    assert found["GPU"].ok == torch.cuda.is_available()
    assert found["bench"].ok == torch.cuda.is_available() or not found["NVML"].ok
    assert found["the page's browser test"].ok == (doctor.browser() is not None)


def test_a_job_names_what_it_lacks():
    have = {n: Finding("part", n, n != "GPU", "") for n in ("Python", "GPU", "cudnn frontend")}
    job = doctor._job("bench", ("Python", "GPU"), have, "note")
    assert (job.ok, job.detail) == (False, "needs GPU")
    assert doctor._job("report", ("Python",), have, "note").detail == "note"


def test_every_job_needs_parts_that_are_looked_for(found):
    for name, needs, _ in doctor._JOBS:
        assert found[name].kind == "job"
        assert all(found[n].kind == "part" for n in needs)


def test_a_package_that_is_absent_or_half_installed():
    assert not doctor._package("x", "no-such-distribution", "no_such_module").ok
    half = doctor._package("x", "numpy", "no_such_module")
    assert not half.ok and "module no_such_module cannot be found" in half.detail
    assert not doctor._package("x", None, "no_such_module").ok


def test_a_tool_that_hangs_or_dies_does_not_stop_the_doctor(monkeypatch):
    def hang(*_, **__):
        raise subprocess.TimeoutExpired("x", 1)

    monkeypatch.setattr(subprocess, "run", hang)
    assert doctor._first_line(["tool"]) == "tool does not answer (TimeoutExpired)"


def test_exit_code_and_json(found, capsys):
    assert doctor.run(True, lambda: list(found.values())) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {"kind", "name", "ok", "detail"} == rows[0].keys() and len(rows) == len(found)
    broken = [dataclasses.replace(f, ok=False) if f.name.startswith("check") else f for f in found.values()]
    assert doctor.run(False, lambda: broken) == 1
    out = capsys.readouterr().out
    assert "What runs here" in out and "does not" in out
