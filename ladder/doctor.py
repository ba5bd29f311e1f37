"""What this machine has, and what of the ladder will run on it. Looks only; installs and changes nothing."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass

PYTHONS = ((3, 11), (3, 12))
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@dataclass(frozen=True)
class Finding:
    """kind "part": something this machine has or lacks. kind "job": something the ladder does, and if it will here."""

    kind: str
    name: str
    ok: bool
    detail: str


def findings() -> list[Finding]:
    """Parts first, then jobs, which are derived from the parts."""
    parts = [_python(), _compiler(), _make(), _torch(), _gpu(), *(_package(*p) for p in _PACKAGES), _browser()]
    have = {part.name: part for part in parts}
    return parts + [_job(name, needs, have, note) for name, needs, note in _JOBS]


_PACKAGES = (
    ("Triton", "triton", "triton"),
    ("flash-linear-attention", "fla-core", "fla"),
    ("CuTe DSL", "nvidia-cutlass-dsl", "cutlass"),
    ("TVM-FFI", "apache-tvm-ffi", "tvm_ffi"),
    ("cuobjdump", "nvidia-cuda-cuobjdump", None),
    ("NVML", "nvidia-ml-py", "pynvml"),
    ("SentryWard", "sentryward", "sentryward"),
    ("cudnn frontend", "nvidia-cudnn-frontend", "cudnn"),
    ("kernel-fun", None, "kernel_fun"),  # no distribution on PyPI: built from source
)
_COMMON = ("Python", "torch", "Triton", "flash-linear-attention")
_JOBS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("compile every rung", (*_COMMON, "C compiler", "CuTe DSL", "cuobjdump"), "no GPU needed"),
    (
        "check, emulated on the CPU",
        (*_COMMON, "C compiler", "CuTe DSL", "TVM-FFI"),
        "small cases; stream, graph and memory checks need a GPU",
    ),
    ("check on the GPU", (*_COMMON, "GPU", "TVM-FFI"), "rungs of this GPU's architecture, all cases"),
    ("bench", (*_COMMON, "GPU", "TVM-FFI", "NVML"), "against the parent, and fla as a rival"),
    (
        "bench with the cudnn rival",
        (*_COMMON, "GPU", "TVM-FFI", "NVML", "cudnn frontend"),
        "else its rows say why it is absent",
    ),
    ("verify", ("Python", "C compiler", "CuTe DSL", "SentryWard"), "proofs on sm_100a PTX"),
    ("report", ("Python",), "terminal, page and README, from the committed records"),
    ("the page's browser test", ("Python", "browser"), "else skipped"),
)


def _job(name: str, needs: tuple[str, ...], have: dict[str, Finding], note: str) -> Finding:
    missing = [n for n in needs if not have[n].ok]
    return Finding("job", name, not missing, f"needs {', '.join(missing)}" if missing else note)


def _python() -> Finding:
    accepted = " or ".join(".".join(map(str, v)) for v in PYTHONS)
    ok = sys.version_info[:2] in PYTHONS
    return Finding("part", "Python", ok, platform.python_version() + ("" if ok else f"; the project needs {accepted}"))


def _compiler() -> Finding:
    path = next((p for name in ("cc", "gcc", "clang") if (p := shutil.which(name))), None)
    return Finding(
        "part", "C compiler", path is not None, _first_line([path, "--version"]) if path else "no cc, gcc or clang"
    )


def _make() -> Finding:
    path = shutil.which("make")
    return Finding("part", "make", path is not None, _first_line([path, "--version"]) if path else "not found")


def _torch() -> Finding:
    if importlib.util.find_spec("torch") is None:
        return Finding("part", "torch", False, "not installed")
    import torch

    build = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    return Finding("part", "torch", True, f"{torch.__version__}, {build}")


def _gpu() -> Finding:
    """The first GPU that torch can use; where there is none, whether the driver or torch's build is what is missing."""
    if importlib.util.find_spec("torch") is None:
        return Finding("part", "GPU", False, "torch is not installed")
    import torch

    driver = (
        _first_line(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"])
        if shutil.which("nvidia-smi")
        else ""
    )
    if not torch.cuda.is_available():
        why = (
            f"{driver}, but this torch is a CPU build"
            if driver and not torch.version.cuda
            else driver or "no NVIDIA driver"
        )
        return Finding("part", "GPU", False, f"none usable ({why})")
    major, minor = torch.cuda.get_device_capability()
    memory = torch.cuda.get_device_properties(0).total_memory / 2**30
    more = f", {torch.cuda.device_count()} GPUs" if torch.cuda.device_count() > 1 else ""
    version = driver.rsplit(",", 1)[-1].strip() if driver else "unknown"
    return Finding(
        "part",
        "GPU",
        True,
        f"{torch.cuda.get_device_name()} (sm_{major}{minor}, {memory:.0f} GiB, driver {version}{more})",
    )


def _package(name: str, distribution: str | None, module: str | None) -> Finding:
    try:
        version = importlib.metadata.version(distribution) if distribution else "version unknown"
    except importlib.metadata.PackageNotFoundError:
        return Finding("part", name, False, f"{distribution} is not installed")
    try:
        found = module is None or importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        found = False
    missing = f"{version}, but module {module} cannot be found" if distribution else f"module {module} is not installed"
    return Finding("part", name, found, version if found else missing)


def browser() -> str | None:
    """The Chromium that the page's test opens."""
    return next((path for name in BROWSERS if (path := shutil.which(name))), None)


def _browser() -> Finding:
    path = browser()
    return Finding(
        "part", "browser", path is not None, _first_line([path, "--version"]) if path else "no Chromium found"
    )


def _first_line(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{command[0]} does not answer ({type(error).__name__})"
    lines = done.stdout.strip().splitlines()
    return lines[0].strip() if lines else f"{command[0]} printed nothing"


def run(as_json: bool = False, look: Callable[[], list[Finding]] = findings) -> int:
    """Print the findings; 0 if the ladder can be compiled and checked here in some way and reported, else 1."""
    found = look()
    if as_json:
        print(json.dumps([asdict(f) for f in found], indent=1))
    else:
        _print(found)
    jobs = {f.name: f.ok for f in found if f.kind == "job"}
    return 0 if jobs["report"] and (jobs["check, emulated on the CPU"] or jobs["check on the GPU"]) else 1


def _print(found: list[Finding]) -> None:
    from rich.table import Table
    from rich.text import Text

    from ladder.show import out

    for kind, title, words in (
        ("part", "This machine", ("yes", "no")),
        ("job", "What runs here", ("runs", "does not")),
    ):
        table = Table(
            title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, show_header=False
        )
        for f in (f for f in found if f.kind == kind):
            table.add_row(
                Text(words[0], "green") if f.ok else Text(words[1], "yellow"),
                f.name,
                Text(f.detail, "" if f.ok else "dim"),
            )
        out.print(table)
