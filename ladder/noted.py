"""Rivals that no registry offers, from a table measured once: their times there, scaled to a run at hand.

FlashKDA (MoonshotAI/FlashKDA) and cuLA (inclusionAI/cuLA, its C++ kernels) were built from source and timed eagerly beside
fla 0.6 on one NVIDIA H200 (torch 2.11.0+cu130, Triton 3.6.0; bf16, K = V = 128, safe gate inside the call, final state on; L2
flushed, median of 15 interleaved rounds). A run that has fla's eager time moves theirs by fla's ratio. Both launch few
kernels, so that eager times stand for them; the clock of such a time is called "noted".
"""

from __future__ import annotations

import statistics
from typing import Any

DEVICE, FORM, CLOCK = "NVIDIA H200", "prod", "noted"
NAMES = ("FlashKDA", "cuLA")
MS = {  # (case, regime): fla, FlashKDA, cuLA
    ("t2048_h12", "strong"): (1.394, 0.324, 0.629), ("t2048_h12", "slow"): (1.413, 0.334, 0.631),
    ("t8192_h24", "strong"): (1.455, 1.065, 1.749), ("t8192_h24", "slow"): (1.748, 1.104, 1.776),
    ("h64", "strong"): (1.811, 1.299, 1.801), ("h64", "slow"): (2.122, 1.387, 1.908),
    ("h96", "strong"): (2.629, 1.502, 1.757), ("h96", "slow"): (2.698, 1.526, 1.803),
    ("b8_h16_t4096", "strong"): (1.767, 0.882, 1.119), ("b8_h16_t4096", "slow"): (1.922, 0.948, 1.084),
    ("t32768_h32", "strong"): (3.866, 4.232, 6.502), ("t32768_h32", "slow"): (3.837, 4.173, 6.412),
}  # fmt: skip


def rivals(record: dict[str, Any], cell: dict[str, Any]) -> dict[str, float]:
    """Milliseconds by name for a cell of a bench record; nothing for another device, case or form, or without fla."""
    eager = (cell.get("eager_ms") or {}).get("fla-safe")
    noted = MS.get((cell["case"], cell["regime"])) if cell["form"] == FORM else None
    if record["device"].get("name") != DEVICE or not noted or not eager:
        return {}
    ratio = statistics.median(eager) / noted[0]
    return {name: ms * ratio for name, ms in zip(NAMES, noted[1:])}
