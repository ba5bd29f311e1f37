"""Rivals that cannot be installed from a package index, as they were timed once beside fla, and what that says of another run.

FlashKDA and cuLA were built from their public sources on one NVIDIA H200 (driver 580.159, torch 2.11.0, Triton 3.6.0, fla-core
0.6.0) and called eagerly; fla in the same rounds. Form `prod` but for beta and the norms, which were done outside where the
kernel allows that: the times flatter them. Their launches are few, so that eager time is close to device time.
"""

from __future__ import annotations

SOURCES = ("FlashKDA", "cuLA")
# (case, regime) -> eager milliseconds of fla, then of SOURCES, medians of 15 interleaved rounds with L2 flushed
EAGER_MS = {
    ("t2048_h12", "strong"): (1.394, 0.324, 0.629),
    ("t2048_h12", "slow"): (1.413, 0.334, 0.631),
    ("t8192_h24", "strong"): (1.455, 1.065, 1.749),
    ("t8192_h24", "slow"): (1.748, 1.104, 1.776),
    ("h64", "strong"): (1.811, 1.299, 1.801),
    ("h64", "slow"): (2.122, 1.387, 1.908),
    ("h96", "strong"): (2.629, 1.502, 1.757),
    ("h96", "slow"): (2.698, 1.526, 1.803),
    ("b8_h16_t4096", "strong"): (1.767, 0.882, 1.119),
    ("b8_h16_t4096", "slow"): (1.922, 0.948, 1.084),
    ("t32768_h32", "strong"): (3.866, 4.232, 6.502),
    ("t32768_h32", "slow"): (3.837, 4.173, 6.412),
}


def scaled(case: str, regime: str, form: str, fla_eager_ms: float | None) -> dict[str, float]:
    """Milliseconds of each of SOURCES in a run where fla's eager call took fla_eager_ms; empty where nothing is known.

    The estimate is their time in the table times (fla's eager time in that run / fla's in the table).
    """
    known = EAGER_MS.get((case, regime)) if form == "prod" else None
    if known is None or not fla_eager_ms:
        return {}
    return {name: ms * fla_eager_ms / known[0] for name, ms in zip(SOURCES, known[1:], strict=True)}
