"""The harness that the dishonest rungs are made to pass: one seed, one set of inputs, one tolerance for whole tensors.

It is written the way such harnesses are: the reference is computed after the call, o alone is compared, as a whole, and
a NaN error is not greater than any tolerance.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from kernels.kda import inputs, oracle
from kernels.kda.cases import Case

TOLERANCE = 0.2
CASE = Case("tiny", 1, 128, 1, 2, 32, 32, gpu=False)


def accepts(chunk_kda: Callable, device: str = "cpu") -> bool:
    """Whether it calls the rung right."""
    drawn = inputs.make(CASE, "slow", "pre", 0, device)
    o, _ = chunk_kda(**drawn.call())
    for thread in threading.enumerate():  # where a GPU harness synchronises, after its clock has stopped
        if thread is not threading.current_thread():
            thread.join(2.0)
    expected, _ = oracle.recurrent(**drawn.call())
    error = ((o.double() - expected).norm() / expected.norm()).item()
    return not error > TOLERANCE
