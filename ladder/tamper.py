"""Whether somebody replaced what judges and times a rung: the runner's functions, and those that it trusts.

This sees the patches that people and generators write, not a rung that aims at this file: code that runs in a process
can always deceive that process. What decides about a rung's values therefore runs in another one (ladder.judge).
"""

from __future__ import annotations

import os
import sys
from typing import Any

Snapshot = dict[str, dict[str, Any]]
OURS = ("ladder.", "kernels.kda.")
TRUSTED = ("torch", "torch.cuda", "torch.testing", "torch.profiler", "time", "gc")
CLASSES = (("torch", "Tensor"), ("torch.cuda", "Event"), ("torch.cuda", "Stream"), ("torch.cuda", "CUDAGraph"),
           ("ladder.timing", "CudaTimer"), ("ladder.checks.context", "Context"))  # fmt: skip


def snapshot() -> Snapshot:
    """What every trusted name stands for now."""
    found: Snapshot = {}
    for name, module in list(sys.modules.items()):
        if module is not None and name.startswith(OURS):
            found[name] = dict(vars(module))
        elif name in TRUSTED:
            found[name] = {key: value for key, value in vars(module).items() if callable(value)}
    for name, kind in CLASSES:
        if name in sys.modules:
            found[f"{name}.{kind}"] = dict(vars(getattr(sys.modules[name], kind)))
    return found


def replaced(before: Snapshot) -> list[str]:
    """Names that stand for something else than they did in `before`."""
    now, out = snapshot(), []
    for owner, names in before.items():
        for name, value in names.items():
            new = now.get(owner, {}).get(name)
            if not name.startswith("__") and new is not value and not _wrapped_by_torch(new, value):
                out.append(f"{owner}.{name}")
    return sorted(out)


def _wrapped_by_torch(new: Any, old: Any) -> bool:
    """torch wraps a few of its own functions when a part of it is first imported (dynamo: torch.manual_seed)."""
    code, torch = getattr(new, "__code__", None), sys.modules["torch"]
    return getattr(new, "__wrapped__", None) is old and code is not None and code.co_filename.startswith(os.path.dirname(torch.__file__))


def complaint(before: Snapshot) -> str | None:
    """One line that names what was replaced, or None."""
    names = replaced(before)
    return f"replaces {', '.join(names[:5])}{' and more' if len(names) > 5 else ''}" if names else None
