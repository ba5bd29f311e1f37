"""What goes to a GPU box and what comes home from it."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch

from _common import cute
from kernels.kda import rivals
from ladder import build, bundle, manifest, needed, record, warm


@pytest.fixture
def home(forge):
    """A ladder of one rung, and a folder with a record of it made elsewhere."""
    forge.rung("one")
    ladder = manifest.load(forge.root)
    away = forge.root / "away"
    made = record.new("bench", ladder, ladder.rung(1), {"name": "a GPU"}, copy_gbps=1.0, seeds={}, cells=[], failed=[])
    path = record.path_for(away, made)
    record.write(path, made)
    return forge, away, path


def test_records_come_home_once(home):
    forge, away, path = home
    (filed,) = bundle.collect(away, forge.root)
    assert filed == forge.root / "ideas" / "001-one" / "records" / path.name
    assert record.read(filed) == record.read(path)
    assert bundle.collect(away, forge.root) == []


def test_nothing_is_filed_beside_a_foreign_record(home):
    forge, away, path = home
    (away / "z.json").write_text(json.dumps(record.read(path) | {"rung": "009-other"}))
    with pytest.raises(bundle.BundleError, match=r"^z.json: is of rung '009-other', accepted: 001-one$"):
        bundle.collect(away, forge.root)
    assert not list((forge.root / "ideas" / "001-one" / "records").iterdir())


def test_records_come_home_in_an_archive(home):
    forge, away, path = home
    data = record.read(path)
    with tarfile.open(away / "records.tgz", "w:gz") as archive:
        archive.add(path, path.name)
    path.unlink()
    (filed,) = bundle.collect(away, forge.root)
    assert filed == forge.root / "ideas" / "001-one" / "records" / path.name and record.read(filed) == data
    (away / "records.tgz").write_bytes((away / "records.tgz").read_bytes()[:100])
    with pytest.raises(bundle.BundleError, match="^records.tgz: cannot be unpacked: "):
        bundle.collect(away, forge.root)


def test_a_full_folder_is_refused(tmp_path):
    (tmp_path / "kept").write_text("mine")
    with pytest.raises(bundle.BundleError, match="^DEST: given .*, which exists, accepted: a new or an empty folder$"):
        bundle.make(tmp_path)
    assert (tmp_path / "kept").read_text() == "mine" and len(list(tmp_path.parent.glob(".*-*"))) == 0


def test_what_travels():
    needs = bundle._needs("kda-ladder", bundle._canonical(bundle.ASSUMED), set())
    assert {"fla-core", "pydantic", "pydantic-core", "apache-tvm-ffi", "typer"} <= needs
    assert not needs & {"torch", "triton", "numpy", "nvidia-cutlass-dsl"}


@pytest.mark.slow  # the runtime library takes its time to compress
def test_units_travel_in_one_archive(tmp_path):
    """What `activate` unpacks into .build/ on the box: here that of a rung without units."""
    bundle._compile_units(tmp_path / "build.tar.xz", "sm_90a", [1], print)
    command = next(line for line in bundle.ACTIVATE.splitlines() if "tarfile" in line).removesuffix(" || return").strip()
    (tmp_path / "code").mkdir()
    environment = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "bundle": str(tmp_path)}
    subprocess.run(["bash", "-c", command], env=environment, check=True)
    build = tmp_path / "code" / ".build"
    assert json.loads((build / "toolchain.json").read_text()) == cute.toolchain()
    assert (build / cute.RUNTIME).read_bytes() == cute.runtime_library().read_bytes()


def test_the_box_without_a_gpu_says_so(forge):
    """The two scripts as they are: the check runs, what needs a GPU refuses in one line, and the whole ends in failure."""
    forge.rung("one")
    box = forge.root / "box"
    bundle._copy_code(box / "code")
    for name in ("ideas", "ladder.yaml"):
        (shutil.rmtree if name == "ideas" else Path.unlink)(box / "code" / name)
        shutil.move(forge.root / name, box / "code" / name)
    for folder in ("site", "bin", "triton-cache"):
        (box / folder).mkdir()
    (box / "bin" / "python3").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (box / "bin" / "python3").chmod(0o755)
    (box / "activate").write_text(bundle.ACTIVATE)
    (box / "run").write_text(bundle.RUN)
    environment = {"PATH": f"{box / 'bin'}:/usr/bin:/bin", "HOME": str(box), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(["bash", box / "run", box / "out"], env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert "warm: no GPU is visible here" in done.stderr and "bench: no GPU is visible here" in done.stderr
    assert {path.name for path in (box / "out").iterdir()} == {"records.tgz", "triton-cache.tgz.aa"}
    with tarfile.open(box / "out" / "records.tgz") as tar:
        assert b" 0 failed" in tar.extractfile("./check-1.log").read()
    for name in ("ideas", "ladder.yaml"):
        shutil.move(box / "code" / name, forge.root / name)
    filed = bundle.collect(box / "out", forge.root)
    found = [record.read(path) for path in filed if path.parent.parent.name == "001-one"]
    assert sorted((r["kind"], r["rung"]) for r in found) == [("check", "001-one"), ("precision", "001-one")]
    tests = [json.loads(path.read_text()) for path in filed if path.parent == forge.root / "tests" / "records"]
    assert len(tests) == 2 and all(t["complete"] and t["outcomes"] and t["code_hash"] for t in tests)
    assert {o["outcome"] for t in tests for o in t["outcomes"].values()} == {"skipped"}


def test_a_run_that_is_cut_short_leaves_its_records(tmp_path):
    """Killed outright while a check is at work: what it had recorded some seconds before is in OUT."""
    box = tmp_path / "box"
    (box / "code").mkdir(parents=True)
    (box / "bin").mkdir()
    (box / "activate").write_text("bundle=" + str(box))
    stand_in = '#!/bin/bash\n[[ $3 == check ]] && echo "{}" >"$6/check-1.json" && touch working && sleep 60\n'
    (box / "bin" / "python3").write_text(stand_in)
    (box / "bin" / "python3").chmod(0o755)
    assert bundle.RUN.count("sleep 20") == 1
    (box / "run").write_text(bundle.RUN.replace("sleep 20", "sleep 0.2"))
    environment = {"PATH": f"{box / 'bin'}:/usr/bin:/bin"}
    run = subprocess.Popen(["bash", box / "run", box / "out", "1"], env=environment, start_new_session=True)
    try:
        until = time.monotonic() + 30
        while not (packed(box / "out") and (box / "code" / "working").exists()) and time.monotonic() < until:
            time.sleep(0.1)
    finally:
        os.killpg(run.pid, signal.SIGKILL)
        run.wait()
    assert packed(box / "out") == ["check-1.json"]


def packed(out):
    """The records in OUT's archive."""
    if not (out / "records.tgz").exists():
        return []
    with tarfile.open(out / "records.tgz") as tar:
        return [Path(name).name for name in tar.getnames() if name.endswith(".json")]


def test_the_cache_travels_in_parts(tmp_path, monkeypatch):
    """What `run` split, `bundle --triton-cache OUT` takes along and `activate` joins."""
    away, cache = tmp_path / "away", tmp_path / "away" / "triton-cache"
    cache.mkdir(parents=True)
    (cache / "kernel").write_bytes(os.urandom(100_000))
    out, box = tmp_path / "out", tmp_path / "box"
    out.mkdir()
    split = next(line for line in bundle.RUN.splitlines() if "| split" in line)
    assert "-b 15m" in split
    split = split.replace("-b 15m", "-b 30k")
    subprocess.run(["bash", "-c", split], env={"PATH": "/usr/bin:/bin", "bundle": str(away), "out": str(out)}, check=True)
    assert len(list(out.iterdir())) == 4
    for name in ("_copy_code", "_compile_units", "_wheels"):
        monkeypatch.setattr(bundle, name, lambda dest, *rest: dest.name == "code" and dest.mkdir())
    bundle.make(box, triton_cache=out)
    joined = bundle.ACTIVATE[bundle.ACTIVATE.index("  if compgen") :].partition("  fi\n")
    subprocess.run(["bash", "-c", "".join(joined[:2])], env={"PATH": "/usr/bin:/bin", "bundle": str(box)}, check=True)
    assert (box / "triton-cache" / "kernel").read_bytes() == (cache / "kernel").read_bytes()


@pytest.mark.parametrize("given", ["nothing", "out", "out/triton-cache.tgz.aa"])
def test_a_cache_that_is_none_is_refused_at_once(tmp_path, given):
    (tmp_path / "out").mkdir()
    if "aa" in given:
        (tmp_path / given).touch()
    with pytest.raises(bundle.BundleError, match="^triton-cache: given .*, accepted: a folder with triton-cache.tgz.* in it"):
        bundle.make(tmp_path / "box", triton_cache=tmp_path / given)


def test_warm_calls_every_rung_and_names_what_fails(forge, monkeypatch):
    forge.rung("right")
    forge.rung("wrong", ("    io = p.io_dtype\n", "    io = p.io_dtype\n    raise ValueError('no such tile')\n"))
    ladder = forge.ladder()
    cells = ladder.cells(gpu=False)[:1]
    monkeypatch.setattr(rivals, "ALL", ())
    assert warm.call_all(ladder, [1], cells, "cpu") == []
    (line,) = warm.call_all(ladder, [1, 2], cells, "cpu")
    assert line == f"002-wrong {cells[0]}: ValueError: no such tile"


def test_warm_covers_every_gpu_case_under_both_gates():
    ladder = manifest.load()
    groups = warm.groups(ladder)
    assert {(c.case.name, c.regime) for group in groups for c in group} == \
        {(name, regime) for name, case in ladder.cases.items() if case.gpu for regime in ("strong", "init")}
    assert all({c.form for c in group} == {"prod", "pre"} and len({(c.case, c.regime) for c in group}) == 1 for group in groups)
    assert not torch.cuda.is_initialized()


def test_the_units_needed_are_those_of_every_call_on_a_gpu():
    """Among them what no case of the ladder has: sizes and mixes of dtypes of the hostile inputs."""
    ladder = manifest.load()
    found = [dict(unit.params) for unit in needed.units(ladder, ladder.rung(6), "sm_90a")]
    wanted = [
        {"K": 128, "V": 128, "dtype": "bfloat16", "gate": "safe", "has_h0": False},  # bench, prod
        {"K": 128, "V": 128, "dtype": "float16", "gate": "log", "has_h0": True},
        {"K": 128, "V": 256, "dtype": "bfloat16", "gate": "log", "has_h0": False},  # train
        {"K": 64, "V": 192, "has_h0": True},  # hostile: sizes
        {"dtype": "float16", "g_dtype": "float32", "beta_dtype": "float16", "gate": "log"},  # hostile: dtypes
        {"gate": "softplus", "bounded": False},
        {"K": 64, "V": 64, "gate": "softplus", "has_h0": True},  # capture for the comparison with hardware
    ]
    for params in wanted:
        assert any(params.items() <= unit.items() for unit in found), params
    assert len({tuple(sorted(unit.items(), key=str)) for unit in found}) == len(found)


def _asked_by_the_check(folder, arch, probe):
    """Units that the hostile families themselves load, every call of theirs answered with memory that nobody wrote."""
    from _common import target
    from ladder import checks
    from ladder.checks.context import Context, Failure
    from ladder.loader import load

    idle = build.Idle(arch)
    with target.use(idle):
        ctx = Context(load(folder), arch, "native", torch.device("cpu"), 0, probe, lambda inputs, outputs: None)
        for name in checks.ALL:
            if name.startswith("hostile"):
                try:
                    checks.ALL[name](ctx)
                except Failure:  # unwritten memory is not the right answer
                    continue
    return list(idle.units)


def test_the_units_needed_are_those_that_the_check_loads():
    """007 takes other units for a prefix of one segment than for the whole sequence."""
    ladder = manifest.load()
    rung, probe = ladder.rung(7), ladder.cells(gpu=False)[0]
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        asked = pool.submit(_asked_by_the_check, ladder.folder(rung), "sm_90a", probe).result()
    assert len(asked) > 40
    assert sorted(map(str, set(asked) - set(needed.units(ladder, rung, "sm_90a")))) == []
