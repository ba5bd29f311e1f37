"""CuTe DSL units: compiled for a named architecture with or without a GPU, kept on disk, loaded through TVM-FFI.

A unit's device module defines `build(arch, **params) -> (jit_function, fake_args)`. `compile_unit` compiles it (this
needs the DSL, not a GPU), and leaves a folder under .build/ with the shared object, the PTX and the cubin. The folder's
name is a hash of the unit's sources, parameters, architecture and the toolchain's versions, so that copies of a rung
never load each other's object. A machine without the DSL loads what a machine with it has left there.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from _common.codehash import ROOT, file_hash
from _common.resources import wgmma_faults

BUILD = ROOT / ".build"
TOOLCHAIN = ("nvidia-cutlass-dsl", "apache-tvm-ffi")
RUNTIME = "libcute_dsl_runtime.so"


class CompileError(RuntimeError):
    """A unit could not be compiled or loaded here; the message says which unit and why."""


@dataclass(frozen=True)
class Unit:
    """One compiled host function (and the kernels it launches): `build(arch, **params)` of the module at `source`."""

    name: str
    source: Path
    arch: str
    params: tuple[tuple[str, object], ...] = ()

    def __str__(self) -> str:
        return f"{self.name}[{', '.join(f'{k}={v}' for k, v in self.params)}] for {self.arch}"

    @property
    def key(self) -> str:
        """Name of the unit's folder: sources, parameters, architecture and toolchain."""
        salt = (self.name, self.arch, repr(self.params), json.dumps(toolchain(), sort_keys=True))
        return f"{self.name}-{self.arch}-{file_hash([self.source], *salt)[:20]}"


@dataclass(frozen=True)
class Artifact:
    """What a compiled unit left on disk. meta: unit, versions and the digest of each file."""

    folder: Path
    meta: dict

    @property
    def so(self) -> Path:
        return self.folder / "unit.so"

    @property
    def ptx(self) -> Path:
        return self.folder / "unit.ptx"

    @property
    def cubin(self) -> Path:
        return self.folder / "unit.cubin"


def toolchain() -> dict[str, str]:
    """Versions of the packages that decide what a compiled unit is; where they are not installed, those that compiled
    the units found in .build/."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return {name: importlib.metadata.version(name) for name in TOOLCHAIN}
    recorded = BUILD / "toolchain.json"
    if not recorded.is_file():
        raise CompileError(f"{TOOLCHAIN[0]} is not installed, and .build/ holds no units compiled elsewhere")
    return json.loads(recorded.read_text())


def compile_unit(unit: Unit) -> Artifact:
    """The unit's artifact, compiled now unless .build/ has it whole. Safe against concurrent processes (one lock per
    unit) and against truncated files (digests; a damaged folder is rebuilt). Raises CompileError."""
    folder = BUILD / unit.key
    if artifact := _intact(folder):
        return artifact
    BUILD.mkdir(exist_ok=True)
    with _lock(BUILD / f"{unit.key}.lock"):
        if artifact := _intact(folder):
            return artifact
        scratch = Path(tempfile.mkdtemp(prefix=f".{unit.name}-", dir=BUILD))
        try:
            _compile(unit, scratch)
            shutil.rmtree(folder, ignore_errors=True)
            os.replace(scratch, folder)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        _replace_text(BUILD / "toolchain.json", json.dumps(toolchain()))
    artifact = _intact(folder)
    assert artifact is not None
    return artifact


def load_compiled(unit: Unit) -> Callable:
    """The unit's host function, through TVM-FFI: fn(*torch tensors, *scalars) on torch's current stream. It checks
    dtype, rank, static strides and device at each call. Raises CompileError."""
    artifact = compile_unit(unit)
    import tvm_ffi

    _load_runtime()
    return getattr(tvm_ffi.load_module(str(artifact.so)), unit.name)


def import_source(path: Path):
    """The module at `path`, under a name of its own, with its folder's siblings importable as `from . import x`."""
    package = "rung_" + hashlib.sha256(str(path.parent).encode()).hexdigest()[:12]
    if package not in sys.modules:
        spec = importlib.util.spec_from_loader(package, loader=None, is_package=True)
        sys.modules[package] = importlib.util.module_from_spec(spec)
        sys.modules[package].__path__ = [str(path.parent)]
    return importlib.import_module(f"{package}.{path.stem}")


def _compile(unit: Unit, folder: Path) -> None:
    try:
        import cutlass.cute as cute
    except ImportError as e:
        raise CompileError(f"{unit}: not in .build/, and the CuTe DSL to compile it is not installed ({e})") from e
    function, args = import_source(unit.source).build(unit.arch, **dict(unit.params))
    options = f"--enable-tvm-ffi --gpu-arch {unit.arch} --keep-ptx --keep-cubin --generate-line-info --dump-dir {folder}"
    compiled = cute.compile(function, *args, options=options)
    compiled.export_to_c(str(folder / "unit.o"), unit.name)
    subprocess.run(["cc", "-shared", "-o", "unit.so", "unit.o"], cwd=folder, check=True, capture_output=True)
    ptx, cubin = compiled.__ptx__, compiled.__cubin__
    if faults := wgmma_faults(ptx, cubin):
        raise CompileError(f"{unit}: {'; '.join(faults)}")
    for file in folder.iterdir():
        if file.name != "unit.so":
            file.unlink()
    (folder / "unit.ptx").write_text(ptx.rstrip("\0"))
    (folder / "unit.cubin").write_bytes(cubin)
    files = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.iterdir())}
    meta = {"unit": unit.name, "arch": unit.arch, "params": dict(unit.params), "toolchain": toolchain(), "files": files}
    (folder / "meta.json").write_text(json.dumps(meta, indent=1))


def _intact(folder: Path) -> Artifact | None:
    try:
        meta = json.loads((folder / "meta.json").read_text())
        whole = all(hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest for name, digest in meta["files"].items())
    except (OSError, ValueError, KeyError):
        return None
    return Artifact(folder, meta) if whole else None


def runtime_library() -> Path:
    """The DSL's runtime, which exported units link against: from the installed DSL, else from .build/ (where a bundle
    puts it). Raises CompileError."""
    spec = importlib.util.find_spec("nvidia_cutlass_dsl")
    roots = [Path(p) for p in spec.submodule_search_locations] if spec else []
    found = [p for root in roots for p in sorted(root.glob(f"cu*/lib/{RUNTIME}"), reverse=True)] + [BUILD / RUNTIME]
    for path in found:
        if path.is_file():
            return path
    raise CompileError(f"{RUNTIME}: not found; install nvidia-cutlass-dsl or put it into .build/")


@cache
def _load_runtime() -> None:
    ctypes.CDLL(str(runtime_library()), mode=ctypes.RTLD_GLOBAL)


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # released when the file closes, however the process ends
        yield


def _replace_text(path: Path, text: str) -> None:
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(text)
    os.replace(temporary, path)
