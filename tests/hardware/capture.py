"""What the hardware does: one-instruction programs and every rung's stages, run on an H200 and kept for the emulator's tests.

One device call, about two minutes, from the project's folder:

    python -m ladder bundle .bundle                                       at home: code, compiled units, wheels
    carry: .bundle
    . .bundle/activate && python3 tests/hardware/capture.py run $OUT      on the device machine
    python tests/hardware/capture.py file FOLDER                          at home: FOLDER is where $OUT's files came back
    python -m pytest tests/hardware                                       at home: emulates the same PTX and compares
    python tests/hardware/capture.py table                                the same as a table

`run --emulated` makes the same files with the emulator as the device, to try the path; such files are not filed. Every group of
programs and every cell of the rungs has a process of its own; what crashes or hangs one is told in record.json, and the rest of
its process's work goes on in a new one.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from datetime import datetime, timezone
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE)]
try:
    import _common  # noqa: F401  the bundle's, or the installed project's
except ImportError:
    sys.path[1:1] = [str(HERE.parents[1])]

import fixture_files  # noqa: E402
from fixture_files import Arrays, FixtureError  # noqa: E402
from programs import MODULES, everything  # noqa: E402
from programs.program import Map, Program  # noqa: E402

SEED = 20261130
STALL_S = {"programs": 20.0, "rungs": 90.0}  # one item may take so long, the start of its process (and compiling) included
PROCESSES = 10  # one for each cell, and two for the programs


def cells() -> dict:
    """The ladder's cells for machines without a GPU, as case/regime/form: all four gate regimes, both forms."""
    from ladder import manifest

    return {str(c): c for c in manifest.load(manifest.ROOT).cells(gpu=False)}


def jobs(only: str = "") -> dict[str, list[str]]:
    """What each process is to run: {"programs MODULE": names, "rungs CELL": rung names}. only: a part of a job's name."""
    from ladder import manifest

    rungs = [r.name for r in manifest.load(manifest.ROOT).rungs.values() if "sm_90a" in r.archs and r.status != "falsified"]
    found = {f"programs {m}": [n for n, p in everything().items() if p.group == m] for m in MODULES}
    found |= {f"rungs {cell}": rungs for cell in cells()}
    return {name: items for name, items in found.items() if only in name}


# ---- in a child --------------------------------------------------------------------------------------------------------


def child(job: str, items: list[str], out: Path, emulated: bool) -> None:
    """Run the items in turn; each leaves NUMBER.json and NUMBER.npz in `out`, the JSON last."""
    kind, _, what = job.partition(" ")
    run = _programs(emulated) if kind == "programs" else _rungs(what, emulated)
    for name in items:
        arrays, n = Arrays(), len(list(out.glob("*.json")))
        try:
            result = {"answer": run(name, arrays)}
        except Exception as e:  # noqa: BLE001  whatever it is, it is this item's
            result = {"failed": f"{type(e).__name__}: {e}"[:2000]}
        _leave(out, n, {"item": name, **result}, arrays)
        if "failed" in result and kind == "programs" and not emulated:
            os._exit(3)  # a failed launch has taken the context along


def _leave(out: Path, n: int, result: dict, arrays: Arrays) -> None:
    import numpy as np

    np.savez(out / f"{n}.npz", **arrays.held)
    (out / f"{n}.tmp").write_text(json.dumps(result))
    (out / f"{n}.tmp").rename(out / f"{n}.json")


def _programs(emulated: bool):
    from cuda_driver import Emulated, Gpu

    device = Emulated() if emulated else Gpu()

    def run(name: str, arrays: Arrays) -> dict:
        program = everything()[name]
        outputs, maps = device.run(program)
        return {
            "text": program.text, "block": program.block, "grid": program.grid,
            "specs": {n: asdict(m) for n, m in program.maps.items()}, "maps": {n: m.hex() for n, m in maps.items()},
            "inputs": {n: arrays.put(x) for n, x in program.inputs.items()},
            "outputs": {n: arrays.put(x) for n, x in outputs.items()},
        }  # fmt: skip

    return run


def _rungs(cell: str, emulated: bool):
    import torch

    from ladder import autotune, loader, manifest

    torch.set_num_threads(1)
    import stage_recorder

    from _common import target

    name = "NVIDIA H200" if emulated else torch.cuda.get_device_name()
    autotune.use_recorded(name)
    if emulated:
        from emulator import EmulatedTarget, triton_driver

        target.install(stage_recorder.Target(EmulatedTarget("sm_90a", device=triton_driver.activate("sm_90a"))))
    else:
        target.install(stage_recorder.Target(target.Cuda("sm_90a")))
    stage_recorder.hook_triton()
    from ladder.cells import draw

    ladder, (case, regime, form) = manifest.load(manifest.ROOT), cells()[cell].key
    drawn = draw(cells()[cell], SEED, "cpu")
    folders = {r.name: ladder.folder(r) for r in ladder.rungs.values()}

    def run(rung: str, arrays: Arrays) -> dict:
        ptx: dict[str, str] = {}
        found = stage_recorder.record(
            loader.load(folders[rung]), drawn, "cpu" if emulated else "cuda", arrays, ptx, warm=not emulated
        )
        return {"rung": rung, "case": case, "regime": regime, "form": form, "seed": SEED, "ptx": ptx, **found}

    return run


# ---- in the parent -----------------------------------------------------------------------------------------------------


def supervise(job: str, items: list[str], out: Path, emulated: bool) -> list[str]:
    """Children until every item has its result; the one during which a child died or stalled gets a failure. Returns what
    the children said on stderr where they died."""
    out.mkdir(parents=True)
    said = []
    while len(done := list(out.glob("*.json"))) < len(items):
        command = [sys.executable, str(HERE / "capture.py"), "child", job, str(out), *(["--emulated"] if emulated else [])]
        with tempfile.TemporaryFile("w+") as log:
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, text=True)
            process.stdin.write(json.dumps(items[len(done) :]))
            process.stdin.close()
            last, seen = time.monotonic(), len(done)
            while process.poll() is None:
                time.sleep(0.1)
                now = len(list(out.glob("*.json")))
                if now > seen:
                    last, seen = time.monotonic(), now
                elif time.monotonic() - last > STALL_S[job.split()[0]] * (10 if emulated else 1):
                    process.kill()
                    process.wait()
            log.seek(0)
            words = log.read()[-1500:]
        after = list(out.glob("*.json"))
        if len(after) == len(done) or (process.returncode not in (0, 3) and len(after) < len(items)):
            said.append(words)
            _leave(
                out,
                len(after),
                {"item": items[len(after)], "failed": f"its process ended ({process.returncode}): {words[-500:]}"},
                Arrays(),
            )
    return said


def run(out: Path, emulated: bool = False, wanted: dict[str, list[str]] | None = None) -> Path:
    """Everything (or the jobs given), into `out`. Returns it."""
    started, work = time.monotonic(), Path(tempfile.mkdtemp(prefix="capture-"))
    wanted = jobs() if wanted is None else wanted
    try:
        with ThreadPoolExecutor(1 if emulated else PROCESSES) as pool:  # the long ones first
            order = sorted(wanted, key=lambda j: j.startswith("programs"))
            list(pool.map(lambda j: supervise(j, wanted[j], work / j.replace("/", "+"), emulated), order))
        index, arrays, failed = merge(work, list(wanted))
    finally:
        shutil.rmtree(work, ignore_errors=True)
    record = {"schema": 1, "kind": "hardware", "emulated": emulated, **circumstances(emulated), "failed": failed,
              "programs": len(index["programs"]), "stages": sum(len(r.get("stages", ())) for r in index["rungs"]),
              "seconds": round(time.monotonic() - started, 1)}  # fmt: skip
    fixture_files.write(out, record, index, arrays)
    return out


def merge(work: Path, names: list[str]) -> tuple[dict, dict[str, Arrays], dict[str, str]]:
    import numpy as np

    index, arrays, failed = {"ptx": {}, "programs": {}, "rungs": []}, {part: Arrays() for part in fixture_files.PARTS}, {}
    for job in names:
        part = "programs" if job.startswith("programs") else "stages"
        for path in sorted((work / job.replace("/", "+")).glob("*.json"), key=lambda p: int(p.stem)):
            result = json.loads(path.read_text())
            if "failed" in result:
                failed[f"{job}: {result['item']}"] = result["failed"]
                continue
            with np.load(path.with_suffix(".npz")) as held:
                arrays[part].held |= dict(held)
            if part == "programs":
                index["programs"][result["item"]] = result["answer"]
            else:
                index["ptx"] |= result["answer"].pop("ptx")
                index["rungs"].append(result["answer"])
    return index, arrays, failed


def circumstances(emulated: bool) -> dict:
    """Where and when: device, driver, versions, commit, hash of the programs and of this code."""
    from _common.codehash import file_hash
    from ladder import manifest, record

    commit, dirty = record.git_state(manifest.ROOT)
    device = {"name": "emulator", "host": platform.machine()}
    if not emulated:
        fields = ("name", "driver_version", "vbios_version", "memory.total", "clocks.max.sm")
        told = subprocess.run(
            ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"], capture_output=True, text=True
        ).stdout
        device = dict(zip(fields, map(str.strip, told.split("\n")[0].split(",")), strict=False))
    sources = [*sorted(HERE.glob("*.py")), *sorted((HERE / "programs").glob("*.py"))]
    return {"device": device, "date": datetime.now(timezone.utc).isoformat(timespec="seconds"), "versions": record.versions(),
            "commit": commit, "dirty": dirty, "code_hash": file_hash(sources, root=HERE)[:16]}  # fmt: skip


def kept_program(name: str, fixture: fixture_files.Fixture) -> tuple[Program, dict]:
    """A program as it ran, whatever its module makes of it now, and the hardware's outputs."""
    answer, arrays = fixture.index["programs"][name], fixture.arrays["programs"]
    outputs = {n: arrays.get(ref) for n, ref in answer["outputs"].items()}
    maps = {n: Map(**{k: tuple(v) if isinstance(v, list) else v for k, v in m.items()}) for n, m in answer["specs"].items()}
    program = replace(
        everything()[name], text=answer["text"], block=answer["block"], grid=answer["grid"], maps=maps, manual=None,
        inputs={n: arrays.get(ref) for n, ref in answer["inputs"].items()},
        outputs={n: (x.shape, x.dtype.type) for n, x in outputs.items()})  # fmt: skip
    return program, outputs


def compare_program(name: str, fixture: fixture_files.Fixture) -> str | None:
    """What is wrong between a program's kept answer and the emulator's, in words; None where nothing is."""
    from cuda_driver import Emulated

    from emulator.hw import tensormap

    program, hardware = kept_program(name, fixture)
    emulated, maps = Emulated().run(program)
    for n, raw in maps.items():
        kept = bytes.fromhex(fixture.index["programs"][name]["maps"][n])
        theirs, ours = (tensormap.decode(x, check=False) for x in (kept, raw))
        if theirs != ours:
            return f"tensor map {n}: the driver wrote {theirs}, the emulator takes {ours} for it"
    return program.compare.complaint(program.inputs, hardware, emulated)


def file(folder: Path, to: Path = fixture_files.FOLDER) -> Path:
    """Check a capture, put CuTe units' launches in place of their calls, and put it under fixtures/, without rungs that the
    ladder no longer has: nothing here can say what their host code launched. Raises FixtureError."""
    import stage_recorder

    from ladder import manifest

    fixture = fixture_files.Fixture(folder)
    if fixture.record["emulated"] and to == fixture_files.FOLDER:
        raise FixtureError(f"{folder.name}: made by the emulator itself, which proves nothing; accepted: a capture from a GPU")
    known = {r.name for r in manifest.load(manifest.ROOT).rungs.values()}
    fixture.record["left_out"] = sorted({r["rung"] for r in fixture.index["rungs"]} - known)
    fixture.index["rungs"] = [r for r in fixture.index["rungs"] if r["rung"] in known]
    for rung in fixture.index["rungs"]:
        for stage in rung.get("stages", ()):
            made = [stage_recorder.resolve(x, stage["buffers"]) if "unit" in x else [x] for x in stage["launches"]]
            stage["launches"] = [launch for launches in made for launch in launches]
    ran = {launch["ptx"] for r in fixture.index["rungs"] for s in r.get("stages", ()) for launch in s["launches"]}
    fixture.index["ptx"] = {key: text for key, text in fixture.index["ptx"].items() if key in ran}
    for key, text in fixture.index["ptx"].items():  # without the places of sources on the machine that compiled them
        code = re.split(r"(?m)^\s*\.section\s", text, maxsplit=1)[0]  # debug sections run to the end
        fixture.index["ptx"][key] = re.sub(r'(?m)^(\s*\.file\s+\d+ ").*?([^/"]+/[^/"]+")', r"\1\2", code)
    shutil.rmtree(to, ignore_errors=True)
    fixture_files.write(to, fixture.record, fixture.index, fixture.arrays)
    return to


def table(fixture: fixture_files.Fixture) -> str:
    """Markdown: device and versions, programs by module, approximate functions, stages by rung over all cells."""
    import stage_compare
    from cuda_driver import Emulated
    from programs.program import Within

    record, answers = fixture.record, fixture.index["programs"]
    versions = ", ".join(f"{n} {record['versions'][n]}" for n in ("torch", "triton", "fla-core"))
    driver = record["device"].get("driver_version", "none")
    lines = [f"{record['device']['name']}, driver {driver}, {record['date'][:10]}; {versions}.", "",
             "| programs | same bits | within the manual's error | refused by both | not as the hardware | not in the capture |",
             "|---|---|---|---|---|---|"]  # fmt: skip
    within = []
    for module in MODULES:
        of = {n: p for n, p in everything().items() if p.group == module}
        wrong = {n: c for n in of if n in answers and (c := compare_program(n, fixture))}
        near = [n for n, p in of.items() if n in answers and n not in wrong and isinstance(p.compare, Within)]
        traps = [n for n, p in of.items() if p.traps and f"programs {module}: {n}" in record["failed"]]
        same = len([n for n in of if n in answers]) - len(wrong) - len(near)
        told = "; ".join(f"{n}: {c}" for n, c in wrong.items()) or "-"
        left = len(of) - same - len(near) - len(traps) - len(wrong)
        lines.append(f"| {module} | {same} | {len(near)} | {len(traps)} | {told} | {left} |")
        within += near
    lines += ["", "| function | same bits, % | error / allowed: hardware | emulator |", "|---|---|---|---|"]
    for name in within:
        program, hardware = kept_program(name, fixture)
        a, b = hardware["y"], Emulated().run(program)[0]["y"]
        worst = [f"{program.compare.worst(program.inputs, y):.2f}" for y in (a, b)]
        lines.append(f"| {name} | {share(int((a.view('u4') == b.view('u4')).sum()), len(a))} | {worst[0]} | {worst[1]} |")
    lines += ["", "| rung, stage | tensor | cells | same bits, % | least cell | compared | worst / radius |",
              "|---|---|---|---|---|---|---|"]  # fmt: skip
    found, seen, wrong = {}, set(), []
    for rung in fixture.index["rungs"]:
        for stage in rung.get("stages", ()):
            if not stage["launches"] or (key := json.dumps(stage, sort_keys=True)) in seen:
                continue
            seen.add(key)
            for row in stage_compare.compare(rung, stage, fixture):
                if row.output:
                    found.setdefault((row.rung, row.stage, row.tensor), []).append(row)
                if row.complaint:
                    wrong.append(f"{row.rung} {row.cell} {row.stage} {row.tensor}: {row.complaint}")
    for (rung, stage, tensor), rows in found.items():
        how = " or ".join(sorted({"bitwise" if r.bitwise else "ball" for r in rows}))
        least = min(rows, key=lambda r: r.equal / r.elements)
        whole = share(sum(r.equal for r in rows), sum(r.elements for r in rows))
        lines.append(f"| {rung} {stage} | {tensor} | {len(rows)} | {whole} | {share(least.equal, least.elements)} | {how} "
                     f"| {max(r.worst for r in rows):.2f} |")  # fmt: skip
    return "\n".join([*lines, *(["", "Not as the hardware:", *wrong] if wrong else [])])


def share(part: int, whole: int) -> str:
    """A percentage that says 100 for all and nothing but all."""
    return "100" if part == whole else f"{min(100 * part / whole, 99.99):.2f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    p = commands.add_parser("run", help="run everything here and write the files to OUT")
    p.add_argument("out", type=Path)
    p.add_argument("--only", default="", help="jobs with this in their name")
    p.add_argument("--emulated", action="store_true", help="with the emulator as the device")
    p = commands.add_parser("file", help="put a capture's files under tests/hardware/fixtures")
    p.add_argument("folder", type=Path)
    p = commands.add_parser("table", help="what the emulator makes of a capture, stage by stage")
    p.add_argument("folder", type=Path, nargs="?", default=fixture_files.FOLDER)
    p = commands.add_parser("child")
    p.add_argument("job")
    p.add_argument("out", type=Path)
    p.add_argument("--emulated", action="store_true")
    a = parser.parse_args()
    if a.command == "child":
        child(a.job, json.load(sys.stdin), a.out, a.emulated)
        return 0
    try:
        if a.command == "table":
            print(table(fixture_files.Fixture(a.folder)))
            return 0
        folder = run(a.out, a.emulated, jobs(a.only)) if a.command == "run" else file(a.folder)
    except FixtureError as e:
        print(e, file=sys.stderr)
        return 1
    record = json.loads((folder / "record.json").read_text())
    print(f"{record['programs']} programs and {record['stages']} stages on {record['device']['name']} in {record['seconds']} s; "
          f"{len(record['failed'])} failed")  # fmt: skip
    for name, why in record["failed"].items():
        print(f"  {name}: {' '.join(why.split())[:300]}")
    for path in sorted(folder.iterdir()):
        print(f"  {path.name} {path.stat().st_size}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
