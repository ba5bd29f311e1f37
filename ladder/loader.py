"""Import a rung's kernel.py from a folder whose name is no Python name.

A rung becomes a package of its own, named after its folder and its instance, so that

* `from . import state_sm90` and `import state_sm90` in kernel.py both find the file beside it;
* two rungs, or two instances of one rung (the A/A copy), share no module;
* `from state_sm90 import ...` in one rung never returns another rung's module of that name.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

PREFIX = "_rung_"
EXPORTS = ("STAGES", "unsupported", "chunk_kda", "UNITS")


class LoadError(ImportError):
    """The rung cannot be imported; one line that names the rung and what went wrong."""


@dataclass(frozen=True)
class LoadedRung:
    """An imported rung. instance: 0 for the rung itself, 1 onward for separately imported copies."""

    name: str
    folder: Path
    instance: int
    module: ModuleType
    stages: tuple[Any, ...]
    unsupported: Callable[[Any], str | None]
    chunk_kda: Callable[..., Any]
    units: tuple[Any, ...]

    @property
    def kernels(self) -> tuple[str, ...]:
        """Substrings of the device kernels' names that its stages launch."""
        return tuple(name for stage in self.stages for name in stage.kernels)


_loaded: dict[tuple[Path, int], LoadedRung] = {}


def load(folder: Path, instance: int = 0) -> LoadedRung:
    """Import ideas/NNN-slug once per (folder, instance). Raises LoadError."""
    folder = Path(folder).resolve()
    key = (folder, instance)
    if key not in _loaded:
        _loaded[key] = _load(folder, instance)
    return _loaded[key]


def _load(folder: Path, instance: int) -> LoadedRung:
    path = folder / "kernel.py"
    if not path.is_file():
        raise LoadError(f"{folder.name}: kernel.py is missing from {folder}")
    place = hashlib.sha256(str(folder).encode()).hexdigest()[:8]  # two checkouts may hold folders of one name
    package = f"{PREFIX}{folder.name.replace('-', '_')}_{place}_{instance}"
    try:
        _package(package, folder)
        with _siblings(package, folder):
            module = importlib.import_module(f"{package}.kernel")
    except Exception as error:
        _forget(package)
        raise LoadError(f"{folder.name}: kernel.py cannot be imported: {type(error).__name__}: {error}") from error
    if missing := [name for name in EXPORTS if not hasattr(module, name)]:
        _forget(package)
        raise LoadError(f"{folder.name}: kernel.py does not export {', '.join(missing)}, accepted: {', '.join(EXPORTS)}")
    return LoadedRung(folder.name, folder, instance, module, tuple(module.STAGES), module.unsupported, module.chunk_kda,
                      tuple(module.UNITS))  # fmt: skip


def _forget(package: str) -> None:
    """Drop a half-imported rung, so that the mended one can be imported."""
    for name in [n for n in sys.modules if n == package or n.startswith(package + ".")]:
        del sys.modules[name]


def _package(name: str, folder: Path) -> None:
    """Register an empty package whose modules are the folder's files."""
    package = ModuleType(name, f"The rung in {folder}")
    package.__path__ = [str(folder)]
    package.__spec__ = importlib.util.spec_from_loader(name, loader=None, is_package=True)
    package.__spec__.submodule_search_locations = package.__path__
    sys.modules[name] = package


class _SiblingFinder:
    """Resolves `import x` to the rung's own x.py while that rung is being imported."""

    def __init__(self, package: str, folder: Path) -> None:
        self.package, self.folder = package, folder

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        file = self.folder / f"{name}.py"
        if "." in name or not file.is_file():
            return None
        return importlib.util.spec_from_file_location(name, file)


@contextmanager
def _siblings(package: str, folder: Path):
    """While a rung is imported, plain imports of sibling files find them; their modules then leave the shared names."""
    names = {f.stem for f in folder.glob("*.py")}
    hidden = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    finder = _SiblingFinder(package, folder)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in names & set(sys.modules):
            sys.modules[f"{package}.{name}"] = sys.modules.pop(name)
        sys.modules.update(hidden)
