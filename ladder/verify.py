"""Static proofs of a rung's Blackwell state kernel, without a Blackwell GPU: `python -m ladder verify N`.

The unit's PTX (one V tile, K = 128, bf16, with an initial and a final state) goes through SentryWard at T = 64, 128 and
192: in every schedule, barriers match and end, no two conflicting accesses are unordered, tensor memory outlives its
uses. At T = 64, o and the final state equal ladder/verify_reference.py in real arithmetic. Two things SentryWard does
not model, proxy fences and waits after tensor-memory loads, are read off the text. Every edit of the PTX is listed.

Not proved: rounding, other shapes and dtypes, anything a real GPU would show.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from _common.cute import Unit
from ladder import verify_reference
from ladder.verify_input import Launch, Shape, equality_binding, record
from ladder.verify_ptx import Edit, default_collector, typed_stores, unfenced_stores, unwaited_loads

ARCH = "sm_100a"
DEVICE_FILE = "state_sm100.py"
TOKENS = (64, 128, 192)
EQUAL_TOKENS = 64
PARAMS = {"K": 128, "V": 64, "dtype": "bfloat16", "has_h0": True}
TIMEOUT_S = 900
MEMORY_MIB = 6000
PASSED, FAILED, NOT_RUN = "passed", "failed", "not run"
# SentryWard's results that say nothing of the kernel
UNDECIDED = ("timeout", "memory_budget_exceeded", "analysis_budget_exceeded", "allocation_failed", "tool_failure")


def verify(folder: Path, arch: str = ARCH, tokens: tuple[int, ...] = TOKENS, equality: bool = True,
           on_row: Callable[[dict[str, Any]], None] = lambda row: None) -> list[dict[str, Any]]:  # fmt: skip
    """Prove the state kernel of the rung in `folder`. Rows: rung, arch, property, outcome ("passed", "failed" or "not
    run"), reason (the detail), seconds. on_row is told of each as it is decided."""
    rows: list[dict[str, Any]] = []

    def add(name: str, outcome: str, reason: str, seconds: float = 0.0) -> None:
        rows.append({"rung": folder.name, "arch": arch, "property": name, "outcome": outcome, "reason": reason,
                     "seconds": round(seconds, 1)})  # fmt: skip
        on_row(rows[-1])

    try:
        unit = state_unit(folder, arch)
    except LookupError as error:
        add("proofs", NOT_RUN, str(error))
        return rows
    launches = {T: record(unit, Shape(T)) for T in {*tokens, EQUAL_TOKENS}}
    ptx = launches[EQUAL_TOKENS].ptx
    for name, faults in (("proxy fences", unfenced_stores(ptx)), ("tensor-memory waits", unwaited_loads(ptx))):
        add(name, FAILED if faults else PASSED, "; ".join(faults) or "read off the shipped PTX")
    for T in tokens:
        for row in races(launches[T]):
            add(*row)
    if equality:
        add(*equal(launches[EQUAL_TOKENS]))
    return rows


def state_unit(folder: Path, arch: str) -> Unit:
    """The rung's Blackwell state kernel with PARAMS. Raises LookupError when there is none to prove."""
    source = folder / DEVICE_FILE
    if not arch.startswith("sm_10"):
        raise LookupError(f"{arch}: SentryWard reads Blackwell kernels only (wgmma is unsupported)")
    if not source.is_file():
        raise LookupError(f"no {DEVICE_FILE} in this rung")
    if "g2: cute.Tensor" not in source.read_text():
        raise LookupError("the proofs are of state kernels that read g2 [B,T,HV,K]; this one reads something else")
    return Unit("kda_state", source, arch, tuple(PARAMS.items()))


# ---- SentryWard ----


def races(launch: Launch) -> Iterator[tuple[str, str, str, float]]:
    """Synchronisation, memory and warnings of one launch, as (property, outcome, reason, seconds)."""
    text, edits = default_collector(launch.ptx)
    result, seconds = analyse(text, launch)
    checks, race_free = result.get("checks", {}), result["result"] == "race_free"
    said = {"synchronization": [result["result"], _edits(edits)], "memory": [f"{result.get('race_count', '?')} races"]}
    for check, words in said.items():
        outcome = _outcome(result, race_free and checks.get(check) == "passed")
        words += [] if outcome == PASSED else findings(result)
        yield f"{check}, T={launch.shape.T}", outcome, "; ".join(words), seconds
        seconds = 0.0
    warnings = [str(w.get("message") or w.get("code") or w)[:200] for w in result.get("warnings", [])]
    count = result.get("warning_count", "undecided")
    yield f"no warnings, T={launch.shape.T}", _outcome(result, count == 0), "; ".join([f"{count}", *warnings]), 0.0


def _outcome(result: dict[str, Any], good: bool) -> str:
    return PASSED if good else NOT_RUN if result["result"] in UNDECIDED else FAILED


def analyse(ptx: str, launch: Launch) -> tuple[dict[str, Any], float]:
    """SentryWard's report on `ptx` launched like `launch`, and the seconds it took."""
    from sentryward import verify as prove

    with _workplace(ptx, launch) as folder:
        started = time.monotonic()
        result = prove(folder / "kernel.ptx", input=folder / "input.json", timeout_seconds=TIMEOUT_S,
                       memory_limit_mib=MEMORY_MIB)  # fmt: skip
        return result, time.monotonic() - started


def equal(launch: Launch, reference: str | None = None) -> tuple[str, str, str, float]:
    """Equality of o and the final state with `reference` (source text; ladder/verify_reference.py by default).

    Through the native program, whose flags the public interface does not pass on: without record compression the value
    analysis has each thread's registers.
    """
    name = f"equality, T={launch.shape.T}"
    text, edits = default_collector(launch.ptx)
    text, more = typed_stores(text)
    with _workplace(text, launch) as folder:
        started = time.monotonic()
        (folder / "binding.json").write_text(json.dumps(equality_binding(launch)))
        # torch.export imports the reference's module by the name that SentryWard gives it
        source = reference or Path(verify_reference.__file__).read_text()
        (folder / "example_reference.py").write_text(source)
        files = ("example_reference.py", "input.json", "binding.json")
        capture = [sys.executable, "-m", "sentryward._capture_reference", *files]
        captured = subprocess.run(capture, cwd=folder, capture_output=True, timeout=TIMEOUT_S, check=False)
        if captured.returncode:
            return name, FAILED, f"reference not captured: {captured.stdout.decode()[:300]}", 0.0
        result = _native(folder, captured.stdout)
        seconds = time.monotonic() - started
    outcome = _outcome(result, result["result"] == "verified" and result["checks"]["equivalence"] == "passed")
    found = result.get("equivalence", {})
    equal_families, families = found.get("equivalent_families", 0), found.get("total_output_families", "?")
    said = f"o and ht: {equal_families} of {families} output families"
    reason = "; ".join([said, _edits(edits + more), *([] if outcome == PASSED else findings(result))])
    return name, outcome, reason, seconds


def _native(folder: Path, reference: bytes) -> dict[str, Any]:
    from sentryward.frontend.ptx_native import native_executable

    command = [str(native_executable()), "--ptx", "kernel.ptx", "--config", "input.json", "--sync-threads", "2",
               "--timeout-seconds", str(TIMEOUT_S), "--wellsync-timeout-seconds", str(TIMEOUT_S),
               "--rss-limit-mib", str(MEMORY_MIB),
               "--no-thread-record-compression", "--analyze-scalar-fold", "--require-equivalence", "--reference-stdin",
               "--equivalence-mapping", "binding.json", "--equivalence-timeout-seconds", str(TIMEOUT_S)]  # fmt: skip
    done = subprocess.run(command, cwd=folder, input=reference, capture_output=True, check=False)  # keeps its own time
    try:
        return json.loads(done.stdout)
    except ValueError:
        said = {"code": f"exit {done.returncode}", "message": done.stderr.decode()[-300:]}
        return {"result": "tool_failure", "checks": {"equivalence": "not_run"}, "diagnostics": [said]}


def findings(result: dict[str, Any]) -> list[str]:
    """What a report says is wrong, in a few words each."""
    found = [f"{d.get('code', '')} {d.get('message', '')}".strip() for d in result.get("diagnostics", [])]
    return [text[:300] for text in found[:3]]


def _edits(edits: list[Edit]) -> str:
    return f"edits: {', '.join(map(str, edits))}" if edits else "the shipped PTX"


@contextmanager
def _workplace(ptx: str, launch: Launch) -> Iterator[Path]:
    """A scratch folder with the verifier's input; one run at a time of a user on this machine, each takes gigabytes."""
    with open(Path(tempfile.gettempdir()) / f"kda-ladder-verify-{os.getuid()}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        folder = Path(tempfile.mkdtemp(prefix="verify-"))
        try:
            (folder / "kernel.ptx").write_text(ptx)
            (folder / "input.json").write_text(json.dumps(launch.input))
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


# ---- command line ----


def run(numbers: list[int]) -> int:
    """Prove each rung and print one row per property. The exit code: 0 if nothing failed."""
    from ladder import manifest

    ladder = manifest.load(manifest.ROOT)
    failed = False
    for number in numbers:
        folder = ladder.folder(ladder.rung(number))
        rows = verify(folder, on_row=_show)
        failed |= any(row["outcome"] == FAILED for row in rows)
    return int(failed)


def _show(row: dict[str, Any]) -> None:
    what = f"{row['rung']:<24} {row['arch']:<8} {row['property']:<24} {row['outcome']:<8}"
    print(f"{what} {row['seconds']:>6.1f} s  {row['reason']}", flush=True)
