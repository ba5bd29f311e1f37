"""Autotuned choices of fla's kernels, recorded once per GPU, so that a rung is the same code on every run.

They are kept in fla's own format (fla.ops.utils.cache: one JSON file per kernel, keyed by the autotuner's key) under
kernels/kda/autotuned/<GPU>/, and fla reads them when FLA_CACHE_MODE and FLA_CONFIG_DIR, its own variables, say so
before it is imported: the exact key if it is recorded, else the first that differs in sizes only, else (another dtype) the first of
all. A kernel of which nothing is
recorded is autotuned as ever; `save` adds its choice to the files.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ladder.files import replace_text
from ladder.manifest import ROOT

FOLDER = ROOT / "kernels" / "kda" / "autotuned"


def folder(gpu: str) -> Path:
    """Where the choices for the GPU of this name are kept (fla's way of spelling it)."""
    return FOLDER / re.sub(r"[^0-9A-Za-z]+", "_", gpu).strip("_")


def use_recorded(gpu: str) -> None:
    """Make fla take the recorded choices for `gpu`; must come before fla is imported. Does nothing where the caller's
    environment has chosen already or nothing is recorded."""
    if folder(gpu).is_dir() and "FLA_CACHE_MODE" not in os.environ:
        os.environ["FLA_CACHE_MODE"] = "full"  # exact key, else one that differs in sizes, else the default
        os.environ["FLA_CONFIG_DIR"] = str(folder(gpu))


def save(gpu: str) -> list[Path]:
    """Add every choice that fla's autotuners hold in this process to the files of `gpu`; returns the files that changed."""
    changed = []
    for name, cache in _autotuners():
        from fla.ops.utils.cache import AutotuneKey

        path = folder(gpu) / f"{name}.json"
        old = json.loads(path.read_text()) if path.is_file() else {"kernel_name": name, "autotune_entries": {}}
        new = json.loads(json.dumps(old))
        for key, config in cache.items():
            entry = {"autotune_key": AutotuneKey.normalize_autotune_key(key), "config": _config(config)}
            new["autotune_entries"].setdefault(AutotuneKey.key_hash(key), entry)
        new["default_config"] = next(iter(new["autotune_entries"].values()))["config"]
        if new != old:
            replace_text(path, json.dumps(new, indent=1) + "\n")
            changed.append(path)
    return changed


def _autotuners() -> Iterator[tuple[str, dict[tuple, Any]]]:
    from fla.ops.utils.cache import CachedAutotuner

    seen = set()
    for module in [m for name, m in sys.modules.items() if name.startswith("fla.") and m is not None]:
        for value in list(vars(module).values()):
            while value is not None and not isinstance(value, CachedAutotuner):
                value = getattr(value, "fn", None) if type(value).__module__.startswith("triton.") else None
            if value is not None and id(value) not in seen and value.cache:
                seen.add(id(value))
                yield value.kernel_name, value.cache


def _config(config: Any) -> dict[str, Any]:
    return {"kwargs": dict(config.kwargs), "num_warps": config.num_warps, "num_stages": config.num_stages,
            "num_ctas": config.num_ctas, "maxnreg": config.maxnreg}  # fmt: skip
