"""The command line: `python -m ladder COMMAND`. Commands import what they need when they run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(
    help="A ladder of KDA kernels: check, time and compare its rungs.", no_args_is_help=True, add_completion=False,
    pretty_exceptions_enable=False)  # fmt: skip

Numbers = Annotated[list[int], typer.Argument(help="rung numbers", show_default=False)]
Cases = Annotated[str, typer.Option(help="only these cases, separated by commas")]
Regimes = Annotated[str, typer.Option(help="only these gate regimes: strong, slow, mixed, init")]
Forms = Annotated[str, typer.Option(help="only these forms: prod, pre")]
Records = Annotated[Path | None, typer.Option(help="where records go (default: ideas/NNN-slug/records)")]
Seed = Annotated[int | None, typer.Option(help="replay this seed (default: a fresh one, printed)")]
Json = Annotated[bool, typer.Option("--json", help="print rows for scripts on standard output")]
Root = Annotated[Path | None, typer.Option(help="folder with ladder.yaml and ideas/ (default: this repository)")]

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130


def main() -> None:
    """Entry point: one clear line for every error a user can cause."""
    try:
        app(standalone_mode=True)
    except SystemExit:
        raise  # before the next line is looked at
    except _causable() as error:
        print(error, file=sys.stderr)
        raise SystemExit(USAGE) from None
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(f"{where}{error.strerror or error}", file=sys.stderr)
        raise SystemExit(FAILED) from None


def _causable() -> tuple[type[Exception], ...]:
    """Errors that a user can cause; imported only once something was raised, because torch comes with them."""
    from _common.cute import CompileError
    from ladder.bundle import BundleError
    from ladder.diff import DiffError
    from ladder.loader import LoadError
    from ladder.manifest import ManifestError
    from ladder.record import RecordError
    from ladder.report_readme import ReadmeError
    from ladder.scaffold import ScaffoldError

    return ManifestError, RecordError, LoadError, DiffError, ScaffoldError, ReadmeError, BundleError, CompileError


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def _ladder(root: Path | None) -> Any:
    from ladder import manifest

    return manifest.load(root or manifest.ROOT)


@app.command()
def check(
    numbers: Annotated[list[int] | None, typer.Argument(help="rung numbers (default: all but falsified ones)")] = None,
    cases: Cases = "", regimes: Regimes = "", forms: Forms = "",
    properties: Annotated[str, typer.Option(help="only these properties, separated by commas")] = "",
    archs: Annotated[str, typer.Option(help="only these architectures")] = "",
    device: Annotated[str, typer.Option(help="auto, cuda, or cpu (compiled kernels run in the emulator)")] = "auto",
    seed: Seed = None, records: Records = None, as_json: Json = False, root: Root = None,
    time_limit: Annotated[float, typer.Option(help="seconds a rung may take for one property")] = 600.0,
    memory_limit: Annotated[float, typer.Option(help="GiB of host memory a rung may use")] = 48.0,
    hostile: Annotated[str, typer.Option(help="only these hostile cases (kernels/kda/hostile.py), separated by semicolons")] = "",
) -> None:  # fmt: skip
    """Decide every property of each rung against the exact oracle; what this machine cannot run is listed as not run."""
    raise typer.Exit(_check(_ladder(root), numbers, {
        "cases": _words(cases), "regimes": _words(regimes), "forms": _words(forms), "properties": _words(properties),
        "archs": _words(archs), "device": device, "time_limit_s": time_limit, "records_dir": records,
        "memory_limit": int(memory_limit * 2**30), "hostile": tuple(s.strip() for s in hostile.split(";") if s.strip())}, seed, as_json))  # fmt: skip


def _check(ladder: Any, numbers: list[int] | None, options: dict[str, Any], seed: int | None, as_json: bool) -> int:
    from ladder import check as checking
    from ladder import show
    from ladder.manifest import ManifestError

    if options.get("device", "auto") not in ("auto", "cpu", "cuda"):
        raise ManifestError(f"device: given {options['device']}, accepted: auto, cpu, cuda")
    seed = checking.replay_seed(seed)
    show.line(f"seed {seed} (replay with --seed {seed})")
    run = checking.Run(ladder, ladder.numbers(numbers), checking.Options(seed=seed, **options))
    status = OK
    try:
        with show.progress("checking", run.steps) as tick:
            run.on_row = lambda row: tick(show.step(row))
            run.execute()
    except KeyboardInterrupt:
        show.line(f"interrupted: {len(run.rows)} rows decided{_kept(run.paths)}")
        status = INTERRUPTED
    if as_json:
        print(json.dumps(run.rows, indent=1))
    else:
        show.check_table(run.rows)
    return status or (FAILED if any(row["outcome"] == "failed" for row in run.rows) else OK)


def _kept(paths: list[Path]) -> str:
    return f", kept in {', '.join(map(str, paths))}" if paths else ""


@app.command()
def bench(
    numbers: Numbers, cases: Cases = "", regimes: Regimes = "", forms: Forms = "",
    rivals: Annotated[bool, typer.Option("--rivals", help="time the rivals in the same rounds")] = False,
    stages: Annotated[bool, typer.Option("--stages", help="time each stage of the rungs on its own, too")] = False,
    seconds: Annotated[float, typer.Option(help="time to spend on a cell's rounds, beyond the fewest allowed")] = 2.0,
    seed: Seed = None, records: Records = None, as_json: Json = False, root: Root = None,
) -> None:  # fmt: skip
    """Time each rung against its parent and an A/A copy of the parent, interleaved; needs a GPU."""
    raise typer.Exit(_bench(_ladder(root), numbers, {
        "cases": _words(cases), "regimes": _words(regimes), "forms": _words(forms), "rivals": rivals, "stages": stages,
        "seconds": seconds, "records_dir": records}, seed, as_json))  # fmt: skip


def _bench(ladder: Any, numbers: list[int], options: dict[str, Any], seed: int | None, as_json: bool) -> int:
    from ladder import bench as benching
    from ladder import show
    from ladder.check import replay_seed
    from ladder.rows import bench_rows

    timer = benching.cuda_timer()
    seed = replay_seed(seed)
    show.line(f"seed {seed} (replay with --seed {seed})")
    run = benching.Run(ladder, numbers, benching.Options(seed=seed, **options), timer)
    status = OK
    try:
        with show.progress("timing", len(run.cells)) as tick:
            run.on_cell = lambda cell, note: tick(f"{cell} {note}")
            run.execute()
    except KeyboardInterrupt:
        show.line(f"interrupted: finished cells are kept{_kept(run.paths)}")
        status = INTERRUPTED
    if as_json:
        print(json.dumps([row for record in run.records for row in bench_rows(record)], indent=1))
    else:
        for record in run.records:
            show.bench_table(record)
    for failure in run.failures:
        show.line(f"failed: {failure}")
    return status or (FAILED if run.failures else OK)


@app.command()
def precision(
    numbers: Annotated[list[int] | None, typer.Argument(help="rung numbers (default: all but falsified ones)")] = None,
    cases: Cases = "", regimes: Regimes = "", forms: Forms = "",
    rivals: Annotated[bool, typer.Option("--rivals", help="measure the rivals on the same inputs")] = False,
    seed: Seed = None, records: Records = None, as_json: Json = False, root: Root = None,
) -> None:  # fmt: skip
    """Errors of rungs and rivals relative to fp64: worst row and L2, of o and of the final state."""
    from ladder import precision as measuring
    from ladder import report_terminal, show
    from ladder.check import replay_seed
    from ladder.rows import precision_rows

    ladder, seed = _ladder(root), replay_seed(seed)
    show.line(f"seed {seed} (replay with --seed {seed})")
    run = measuring.Run(ladder, ladder.numbers(numbers), measuring.Options(
        _words(cases), _words(regimes), _words(forms), rivals, seed, records))  # fmt: skip
    status = OK
    try:
        with show.progress("measuring", len(run.cells)) as tick:
            run.on_cell = lambda cell: tick(str(cell))
            run.execute()
    except KeyboardInterrupt:
        show.line(f"interrupted: finished cells are kept{_kept(list(run.paths.values()))}")
        status = INTERRUPTED
    rows = [row for record in run.records for row in precision_rows(record)]
    if as_json:
        print(json.dumps(rows, indent=1))
    else:
        report_terminal.precision_tables(rows)
    for failure in run.failures:
        show.line(f"failed: {failure}")
    over = any(row["within_budget"] is False for row in rows)
    raise typer.Exit(status or (FAILED if run.failures or over else OK))


@app.command()
def rung(number: Annotated[int, typer.Argument(help="rung number")], rivals: bool = True, root: Root = None) -> None:
    """All there is to know about one rung here: compile, check, time on a GPU, and show where it stands."""
    import torch

    ladder = _ladder(root)
    if not torch.cuda.is_available():
        _build(ladder, [number])
    status = _check(ladder, [number], {}, None, False)
    if torch.cuda.is_available() and status == OK:
        status = _bench(ladder, [number], {"rivals": rivals, "stages": True}, None, False)
    from ladder import report as reporting

    reporting.terminal(ladder, rungs=[number])
    raise typer.Exit(status)


@app.command()
def climb(root: Root = None) -> None:
    """Every rung: compile it for each architecture it claims, check it on this machine, and show the ladder."""
    ladder = _ladder(root)
    numbers = ladder.numbers(None)
    status = _build(ladder, numbers)
    status = _check(ladder, numbers, {}, None, False) or status
    from ladder import report as reporting

    reporting.terminal(ladder)
    raise typer.Exit(status)


@app.command()
def build(
    numbers: Annotated[list[int] | None, typer.Argument(help="rung numbers (default: all but falsified ones)")] = None,
    as_json: Json = False, root: Root = None,
) -> None:  # fmt: skip
    """Compile rungs for every architecture they claim, and print registers, spills and shared memory per kernel."""
    ladder = _ladder(root)
    raise typer.Exit(_build(ladder, ladder.numbers(numbers), as_json))


def _build(ladder: Any, numbers: list[int], as_json: bool = False) -> int:
    from ladder import build as building
    from ladder import show

    seats = building.seats(ladder, numbers)
    rows = []
    with show.progress("compiling", len(seats)) as tick:
        for seat, found in building.compiled(ladder, seats):
            rows += found
            tick(f"{seat[0].name} {seat[1]}")
    print(json.dumps(rows, indent=1)) if as_json else show.build_table(rows)
    return FAILED if any(row["error"] for row in rows) else OK


@app.command()
def report(
    html: Annotated[Path | None, typer.Option(help="write the page to this file")] = None,
    write: Annotated[bool, typer.Option("--write", help="refresh the tables in README.md")] = False,
    as_json: Json = False, root: Root = None,
) -> None:  # fmt: skip
    """What the committed records say: terminal table, page with plots, README tables, or rows for scripts."""
    from ladder import report as reporting
    from ladder import show

    ladder = _ladder(root)
    if as_json:
        records, problems = reporting.load(ladder)
        for problem in problems:
            show.line(problem)
        print(json.dumps(reporting.rows(records, ladder), indent=1))
    if html:
        show.line(f"written: {reporting.write_html(html, ladder)}")
    if write:
        show.line("README.md refreshed" if reporting.write_readme(ladder=ladder) else "README.md was current")
    if not (as_json or html or write):
        reporting.terminal(ladder)


@app.command()
def best(as_json: Json = False, root: Root = None) -> None:
    """Which rung is best per cell, against the best rival, and the geometric means that count; from the committed records."""
    from ladder import best as ranking
    from ladder import report as reporting
    from ladder import report_terminal, show

    ladder = _ladder(root)
    records, problems = reporting.load(ladder)
    for problem in problems:
        show.line(problem)
    found = ranking.standing(records, ladder)
    print(json.dumps(found, indent=1)) if as_json else report_terminal.best_tables(found)


@app.command()
def idea(
    frm: Annotated[int, typer.Argument(metavar="FROM", help="the rung to copy")],
    name: Annotated[str, typer.Argument(help="slug of the new rung: lower-case words joined by dashes")],
    root: Root = None,
) -> None:  # fmt: skip
    """Start a rung by copying one to the next number."""
    from ladder import scaffold

    folder = scaffold.idea(frm, name, _ladder(root).root)
    print(f"ideas/{folder.name}: write its NOTES.md first, then change its kernel")


@app.command()
def diff(number: Annotated[int, typer.Argument(help="rung number")],
         unified: Annotated[bool, typer.Option("--unified", "-u", help="show every changed line")] = False,
         root: Root = None) -> None:  # fmt: skip
    """The real difference of a rung to its parent."""
    from ladder import diff as diffing

    print(diffing.render(diffing.rung_diff(number, _ladder(root).root), unified))


@app.command()
def doctor(as_json: Json = False) -> None:
    """What this machine has, and what will run on it."""
    from ladder import doctor as examining

    raise typer.Exit(examining.run(as_json))


@app.command()
def bundle(
    destination: Annotated[Path, typer.Argument(help="a new or empty folder")],
    arch: Annotated[str, typer.Option(help="architecture of the box's GPU")] = "sm_90a",
    python: Annotated[str, typer.Option(help="the box's Python")] = "3.12",
    has: Annotated[str, typer.Option(help="packages that the box has, separated by commas, beyond torch and triton")] = "",
    triton_cache: Annotated[Path | None, typer.Option(help="OUT that an earlier run brought home: its triton-cache.tgz.*")] = None,
) -> None:  # fmt: skip
    """Pack everything a GPU box without network or DSL needs to check and time the rungs."""
    from ladder import bundle as packing
    from ladder import show

    try:
        folder = packing.make(destination, arch, python, _words(has), triton_cache, show.line)
    except packing.BundleError as error:
        show.line(str(error))
        raise typer.Exit(FAILED) from None
    print(f"{folder}: there, run `{folder.name}/run OUT`; bring OUT home and `python -m ladder collect OUT`")


@app.command()
def collect(source: Annotated[Path, typer.Argument(help="folder that a bundle's run has filled")]) -> None:
    """File the records that came home from a GPU box under their rungs."""
    from ladder import bundle as packing
    from ladder import show

    try:
        filed = packing.collect(source)
    except packing.BundleError as error:
        show.line(str(error))
        raise typer.Exit(FAILED) from None
    print("\n".join(f"filed {path.name} under {path.parent.parent.name}" for path in filed) or "nothing new")


@app.command()
def trace(
    number: Annotated[int, typer.Argument(help="rung number")],
    case: Annotated[str, typer.Option(help="a case of ladder.yaml; a small one, for it is executed instruction by instruction")] = "small",
    arch: Annotated[str | None, typer.Option(help="architecture (default: the rung's first)")] = None,
    seed: Annotated[int, typer.Option(help="of the inputs and of the interleaving of the warps")] = 0,
    out: Annotated[Path | None, typer.Option(help="write everything to this file: .html, .svg or .txt")] = None,
    root: Root = None,
) -> None:  # fmt: skip
    """Who did what when in each kernel of a rung, and how much work it was, from executed PTX."""
    from ladder import show
    from ladder import trace as tracing
    from ladder.manifest import ManifestError

    if out and (out.suffix not in tracing.FORMATS or not out.parent.is_dir()):
        raise ManifestError(f"out: given {out}, accepted: a file {', '.join(tracing.FORMATS)} in a folder that exists")
    traced = tracing.run(_ladder(root), number, case, arch, seed)
    print(traced.title, tracing.work(traced), sep="\n\n", end="\n\n")
    print(tracing.summary(traced))
    if out:
        tracing.write(traced, out)
        show.line(f"written: {out}")


@app.command()
def verify(numbers: Numbers) -> None:
    """Prove the Blackwell kernels' synchronisation statically, one row per property."""
    from ladder import verify as proving

    raise typer.Exit(proving.run(numbers))
