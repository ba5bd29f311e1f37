"""A folder that takes the ladder to a GPU box without a network or the CuTe DSL, and the way its records come home.

`make` fills DEST with the project's code, every rung's units compiled ahead of time, the DSL's runtime library, wheels
of the Python packages that the box lacks, and two scripts: `activate` (sourced: puts it all on PYTHONPATH) and `run`
(checks and benches, records into the folder given). `collect` files those records under their rungs.
"""

from __future__ import annotations

import importlib.metadata
import io
import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from packaging.requirements import Requirement

from _common import cute
from ladder import manifest, record

ROOT = manifest.ROOT
CODE = ("kernels", "_common", "emulator", "ladder", "ideas", "tests", "ladder.yaml", "pyproject.toml", "README.md", "NOTES.md")
# What a box has that can run torch's compiler at all, and what it cannot use there.
ASSUMED = ("torch", "triton", "numpy", "setuptools", "packaging", "filelock", "nvidia-cutlass-dsl", "sentryward")
EXTRA = ("nvidia-cudnn-frontend==1.32.0", "pytest>=8")
PLATFORMS = ("manylinux_2_17", "manylinux_2_24", "manylinux_2_27", "manylinux_2_28", "manylinux_2_31", "manylinux_2_34")

ACTIVATE = """\
# Source this file: puts the bundled packages on PYTHONPATH. Unpacks them on first use, into BUNDLE_SITE or beside itself.
bundle=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
site=${BUNDLE_SITE:-$bundle/site}
if [[ ! -d $site ]]; then
  python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$site" "$bundle"/wheels/*.whl || return
  python3 -c 'import sys, tarfile; tarfile.open(sys.argv[1]).extractall(sys.argv[2], filter="data")' "$bundle/build.tar.xz" "$bundle/code/.build" || return
  if compgen -G "$bundle/triton-cache.tgz*" >/dev/null; then
    mkdir -p "$bundle/triton-cache" && cat "$bundle"/triton-cache.tgz* | tar -xzf - -C "$bundle/triton-cache" --strip-components 1
  fi
fi
export PYTHONPATH=$bundle/code:$site${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
export TRITON_CACHE_DIR=$bundle/triton-cache TRITON_CACHE_AUTOTUNING=1
"""

RUN = """\
#!/usr/bin/env bash
# run OUT [RUNG ...]: check and bench these rungs (all but falsified ones by default) here, against the rivals. OUT gets
# records.tgz (records and logs) and Triton's cache in parts. Take OUT home and file it with: python -m ladder collect OUT
set -uo pipefail
out=$(mkdir -p "${1:?usage: run OUT [RUNG ...]}" && cd "$1" && pwd); rungs=("${@:2}")
. "$(dirname "$0")/activate" || exit
cd "$bundle/code"
kept=$(mktemp -d)
pack() {  # a tar that outlives the shell that is killed below writes to a name of its own
  local part="$out/.records.$BASHPID.tgz"
  tar -C "$kept" -czf "$part" .; [[ $? -le 1 ]] && mv "$part" "$out/records.tgz"  # 1: a log grew meanwhile
}
while sleep 20 && kill -0 $$ 2>/dev/null; do pack; done >/dev/null 2>&1 & packing=$!  # a run that is cut short leaves what it had
trap 'kill $packing; wait $packing; rm -f "$out"/.records.*; pack; rm -r "$kept"' EXIT
[[ ${#rungs[@]} -gt 0 ]] || rungs=($(python3 -c 'from ladder import manifest as m; print(*m.load().numbers())'))
python3 -m ladder.warm "${rungs[@]}"
pids=()  # checks need no quiet machine: all rungs at once
for n in "${rungs[@]}"; do python3 -m ladder check "$n" --records "$kept" >"$kept/check-$n.log" 2>&1 & pids+=($!); done
failed=0
for pid in "${pids[@]}"; do wait "$pid" || failed=1; done
tail -n 3 "$kept"/check-*.log
python3 -m ladder bench "${rungs[@]}" --rivals --stages --records "$kept" || failed=1
python3 -m ladder precision "${rungs[@]}" --rivals --records "$kept" || failed=1
python3 -m ladder.call_cost | tee "$kept/call-cost.log"
for part in "dishonest runner" hostile; do  # in processes of their own: large inputs need the memory to themselves
  python3 -m pytest -m gpu -o addopts= $(printf 'tests/%s ' $part) --record "$kept/tests-$(date -u +%Y%m%dT%H%M%SZ).json" || failed=1
done
rm -f "$out"/triton-cache.tgz.*
tar -C "$bundle" -czf - triton-cache | split -b 15m - "$out/triton-cache.tgz."
exit $failed
"""


class BundleError(RuntimeError):
    """The bundle cannot be made, or a record cannot be filed; one line that says why."""


def make(dest: Path, arch: str = "sm_90a", python: str = "3.12", assumed: Iterable[str] = (), triton_cache: Path | None = None,
         progress: Callable[[str], None] = print, numbers: Iterable[int] = ()) -> Path:  # fmt: skip
    """Fill DEST (new or empty) for a box with one GPU of `arch`, that `python` and the `assumed` packages. All or nothing.

    triton_cache: see `_cache_parts`. numbers: the rungs whose units are compiled, all but falsified ones by default. Raises
    BundleError, ManifestError.
    """
    dest = Path(dest).resolve()
    if dest.exists() and (not dest.is_dir() or any(dest.iterdir())):
        raise BundleError(f"DEST: given {dest}, which exists, accepted: a new or an empty folder")
    parts = _cache_parts(triton_cache) if triton_cache else []
    dest.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{dest.name}-", dir=dest.parent))
    try:
        progress("code")
        _copy_code(scratch / "code")
        commit, dirty = record.git_state(ROOT)
        if commit:
            (scratch / "code" / "COMMIT").write_text(f"{commit}{' dirty' if dirty else ''}\n")
        _compile_units(scratch / "build.tar.xz", arch, numbers, progress)
        progress("wheels")
        _wheels(scratch / "wheels", python, {*ASSUMED, *assumed})
        for part in parts:
            shutil.copy(part, scratch)
        (scratch / "activate").write_text(ACTIVATE)
        (scratch / "run").write_text(RUN)
        (scratch / "run").chmod(0o755)
        scratch.chmod(0o755)
        if dest.exists():
            dest.rmdir()
        os.replace(scratch, dest)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return dest


def collect(source: Path, root: Path = ROOT) -> list[Path]:
    """File every record found under `source`, or in a records.tgz there, with its rung, in ideas/NNN-slug/records/, one of
    tests (tests-*.json) in tests/records/; what is there already stays. Returns the new paths. Raises BundleError naming the file that is no record or whose rung is
    unknown; then nothing is filed."""
    ladder = manifest.load(root)
    folders = {rung.name: ladder.folder(rung) for rung in ladder.rungs.values()}
    filed: dict[Path, dict] = {}
    with tempfile.TemporaryDirectory() as unpacked:
        for n, archive in enumerate(sorted(Path(source).rglob("records.tgz"))):
            try:
                with tarfile.open(archive) as tar:
                    tar.extractall(Path(unpacked, str(n)), filter="data")
            except (tarfile.TarError, EOFError, OSError) as e:
                raise BundleError(f"{archive.name}: cannot be unpacked: {e}") from e
        for path in sorted([*Path(source).rglob("*.json"), *Path(unpacked).rglob("*.json")]):
            of_tests = path.name.startswith("tests-")
            try:
                data = json.loads(path.read_text()) if of_tests else record.read(path)
            except (record.RecordError, ValueError) as e:
                raise BundleError(f"{path.name}: {e}") from e
            if not of_tests and data["rung"] not in folders:
                raise BundleError(f"{path.name}: is of rung {data['rung']!r}, accepted: {', '.join(folders)}")
            target = (root / "tests" if of_tests else folders[data["rung"]]) / "records" / path.name
            if not target.exists():
                filed[target] = data
    for target, data in filed.items():
        record.write(target, data)
    return list(filed)


def _cache_parts(given: Path) -> list[Path]:
    """Triton's cache that an earlier run brought home: the files triton-cache.tgz* in a folder, or one triton-cache.tgz."""
    given = Path(given)
    whole = given.is_file() and given.name == "triton-cache.tgz"
    parts = [given] if whole else sorted(given.glob("triton-cache.tgz*"))
    if not parts:
        raise BundleError(f"triton-cache: given {given}, accepted: a folder with triton-cache.tgz.* in it, or a file triton-cache.tgz")
    return parts


def _copy_code(dest: Path) -> None:
    tracked = subprocess.run(["git", "ls-files", "-z", "--", *CODE], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode == 0 and tracked.stdout:
        files = [ROOT / name for name in tracked.stdout.split("\0") if name]
    else:  # not a checkout: everything but caches
        files = [p for name in CODE for p in ([ROOT / name] if (ROOT / name).is_file() else (ROOT / name).rglob("*"))
                 if p.is_file() and "__pycache__" not in p.parts]  # fmt: skip
    for file in files:
        if file.is_file() and file.parent.name != "records":
            (dest / file.relative_to(ROOT)).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, dest / file.relative_to(ROOT))


def _compile_units(dest: Path, arch: str, numbers: Iterable[int], progress: Callable[[str], None]) -> None:
    """What these rungs load on a GPU of `arch`, compiled by as many processes as there are cores, in one archive."""
    from ladder import needed

    ladder = manifest.load(ROOT)
    rungs = [rung for rung in map(ladder.rung, tuple(numbers) or ladder.numbers()) if arch in rung.archs]
    units = [unit for rung in rungs for unit in needed.units(ladder, rung, arch)]
    folders = []
    with ProcessPoolExecutor(os.cpu_count(), mp_context=multiprocessing.get_context("forkserver")) as pool:
        jobs = {pool.submit(cute.compile_unit, unit): unit for unit in units}
        for job in as_completed(jobs):
            folders.append(job.result().folder)
            progress(f"{len(folders)}/{len(units)}: {jobs[job].source.parent.name}: {jobs[job]}")
    versions = json.dumps(cute.toolchain()).encode()
    with tarfile.open(dest, "w:xz", preset=3) as archive:
        entry = tarfile.TarInfo("toolchain.json")
        entry.size = len(versions)
        archive.addfile(entry, io.BytesIO(versions))
        archive.add(cute.runtime_library().resolve(), cute.RUNTIME)
        for folder in sorted(set(folders)):
            archive.add(folder, folder.name)


def _wheels(dest: Path, python: str, assumed: set[str]) -> None:
    """Wheels for the box of everything the project needs, at the versions installed here, but for what it has."""
    dest.mkdir()
    wanted = [f"{name}=={importlib.metadata.version(name)}" for name in sorted(_needs("kda-ladder", _canonical(assumed), set()))]
    wanted += [r for r in EXTRA if Requirement(r).name not in assumed]
    platforms = [x for p in PLATFORMS for x in ("--platform", f"{p}_x86_64")] + ["--platform", "manylinux2014_x86_64"]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--implementation", "cp",
               "--python-version", python, *platforms, "--dest", str(dest), *wanted]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise BundleError(f"wheels for Python {python}: {done.stderr.strip().splitlines()[-1]}")


def _canonical(names: Iterable[str]) -> set[str]:
    return {re.sub(r"[-_.]+", "-", name).lower() for name in names}


def _needs(package: str, assumed: set[str], seen: set[str]) -> set[str]:
    for text in importlib.metadata.requires(package) or ():
        requirement = Requirement(text)
        name = next(iter(_canonical([requirement.name])))
        if name in assumed or name in seen or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        seen.add(name)
        _needs(name, assumed, seen)
    return seen
