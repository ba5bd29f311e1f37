"""Records: replaced in one step, read back whole or refused in one line, stale when their code has changed."""

from __future__ import annotations

import json
import multiprocessing
import os
import time

import pytest

from ladder import record as records
from ladder import timing

DEVICE = {"name": "somewhere", "arch": "sm_90a"}
CELL = {"case": "tiny", "regime": "slow", "form": "pre", "floor_ms": 0.1, "clocks": {"rung": "graph"},
        "samples_ms": {"rung": [1.0], "parent": [1.0], "control": [1.0]}}  # fmt: skip


@pytest.fixture
def bench(forge):
    """(ladder, record of rung 2, whose parent is rung 1)."""
    first = forge.rung("one")
    second = forge.rung("two", parent=first)
    ladder = forge.ladder()
    return ladder, records.new("bench", ladder, ladder.rung(second), DEVICE, copy_gbps=4000.0, seeds={}, cells=[CELL])


def test_written_and_read_back(bench, tmp_path):
    _, record = bench
    path = records.path_for(tmp_path / "records", record)
    records.write(path, record)
    assert records.read(path) == record
    assert path.name.startswith("bench-2") and path.name.endswith(f"Z-{record['code_hash'][:8]}.json")
    assert [p.name for p in path.parent.iterdir()] == [path.name], "no temporary file is left"
    assert records.path_for(path.parent, record) != path, "a second run of the same second gets a name of its own"


def test_record_says_what_was_measured(bench):
    _, record = bench
    for key in ("rung", "number", "parent", "code_hash", "parent_hash", "timing_version", "commit", "dirty", "date", "versions",
                "device", "command", "seeds"):  # fmt: skip
        assert key in record
    assert record["rung"] == "002-two" and record["parent"] == "001-one" and record["versions"]["torch"]
    assert record["parent_hash"] and record["parent_hash"] != record["code_hash"]


@pytest.mark.parametrize(("spoil", "message"), [
    (lambda text: text[: len(text) // 2], "corrupt record: not JSON"),
    (lambda text: "", "corrupt record: not JSON"),
    (lambda text: "[]", "corrupt record: a list, accepted: an object"),
    (lambda text: text.replace('"kind": "bench"', '"kind": "guess"'), "corrupt record: kind: Input should be 'bench', 'check' or 'precision'"),
    (lambda text: text.replace('"schema": 1', '"schema": 2'), "corrupt record: schema: Input should be 1"),
    (lambda text: text.replace('"control"', '"kontrol"'), "corrupt record: cells.0: .*no times of 'control'"),
    (lambda text: text.replace('"code_hash"', '"hash"'), "corrupt record: code_hash: Field required"),
])  # fmt: skip
def test_corrupt_record_is_one_line(bench, tmp_path, spoil, message):
    path = tmp_path / "bench-x.json"
    records.write(path, bench[1])
    path.write_text(spoil(path.read_text()))
    with pytest.raises(records.RecordError, match=f"bench-x.json: {message}") as error:
        records.read(path)
    assert "\n" not in str(error.value)
    good = tmp_path / "bench-y.json"
    records.write(good, bench[1])
    read, problems = records.read_all(tmp_path, "bench")
    assert len(read) == 1 and len(problems) == 1


def test_failed_write_leaves_the_old_record(bench, tmp_path, monkeypatch):
    path = tmp_path / "bench-x.json"
    records.write(path, bench[1])
    monkeypatch.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        records.write(path, {**bench[1], "cells": [CELL] * 9})
    monkeypatch.undo()
    assert len(records.read(path)["cells"]) == 1 and len(list(tmp_path.glob("*x.json*"))) == 1


def test_not_a_number_is_refused(bench, tmp_path):
    with pytest.raises(ValueError, match="JSON compliant"):
        records.write(tmp_path / "x.json", {**bench[1], "copy_gbps": float("nan")})
    assert not (tmp_path / "x.json").exists()


def _write_forever(path, record):
    for n in range(10**6):
        records.write(path, {**record, "cells": [CELL] * (1 + n % 50)})


def test_killed_at_any_moment_the_record_is_whole(bench, tmp_path):
    path = tmp_path / "records" / "bench-x.json"
    records.write(path, bench[1])
    context = multiprocessing.get_context("fork")
    for n in range(12):
        writer = context.Process(target=_write_forever, args=(path, bench[1]))
        writer.start()
        time.sleep(0.02 + 0.007 * n)
        writer.kill()
        writer.join()
        assert records.read(path)["cells"][0] == CELL
    assert len(records.read_all(path.parent)[0]) == 1, "what a killed writer leaves is never read as a record"


def test_fresh_record_is_current_whatever_the_notes_say(bench):
    ladder, record = bench
    assert records.stale(record, ladder) is None
    folder = ladder.folder(ladder.rung(2))
    (folder / "NOTES.md").write_text("other words")
    (folder / "records" / "bench-z.json").write_text(json.dumps(record))
    assert records.stale(record, ladder) is None


def test_changed_code_makes_it_stale(bench):
    ladder, record = bench
    kernel = ladder.folder(ladder.rung(2)) / "kernel.py"
    kernel.write_text(kernel.read_text() + "# one more comment\n")
    assert records.stale(record, ladder).startswith("the code has changed since")


def test_changed_parent_makes_it_stale(bench):
    ladder, record = bench
    kernel = ladder.folder(ladder.rung(1)) / "kernel.py"
    kernel.write_text(kernel.read_text() + "# one more comment\n")
    assert records.stale(record, ladder).startswith("the parent's code has changed since")


def test_another_timing_method_makes_it_stale(bench, monkeypatch):
    ladder, record = bench
    monkeypatch.setattr(timing, "TIMING_VERSION", timing.TIMING_VERSION + 1)
    assert records.stale(record, ladder) == f"timed by method {timing.TIMING_VERSION - 1}, the method now is {timing.TIMING_VERSION}"


def test_removed_rung_makes_it_stale(bench):
    ladder, record = bench
    del ladder.rungs[2]
    assert records.stale(record, ladder) == "002-two is not in ladder.yaml"
