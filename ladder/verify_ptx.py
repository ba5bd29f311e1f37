"""PTX text of a CuTe unit, as the proofs need it: listed edits, and two checks that SentryWard does not make.

SentryWard does not model proxy fences or `tcgen05.wait::ld`: a kernel without them is race-free to it. Both have a
shape that a reading of the text decides, because compiled code keeps them in straight lines.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

HANDS_OVER = ("mbarrier.arrive", "bar.", "barrier.", "tcgen05.commit", "cp.async.bulk.tensor")


@dataclass(frozen=True)
class Edit:
    """A change to the PTX before it is proved. lines: 1-based numbers in the shipped text."""

    what: str
    lines: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.what} ({len(self.lines)} lines: {_spans(self.lines)})"


def _spans(numbers: tuple[int, ...]) -> str:
    """1, 2, 3, 7 as "1-3, 7"."""
    spans: list[list[int]] = []
    for n in numbers:
        if spans and n == spans[-1][1] + 1:
            spans[-1][1] = n
        else:
            spans.append([n, n])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in spans)


def _replace(ptx: str, old: str, new: str, what: str) -> tuple[str, list[Edit]]:
    text = ptx.split("\n")
    lines = tuple(number for number, line in enumerate(text, 1) if old in line)
    return ptx.replace(old, new), [Edit(what, lines)] if lines else []


def default_collector(ptx: str) -> tuple[str, list[Edit]]:
    """Without `.collector::a::discard`, which SentryWard does not read; by the PTX manual (tcgen05.mma,
    collector_usage) it is what an instruction without the qualifier means."""
    what = "tcgen05.mma: collector::a::discard dropped, the default"
    return _replace(ptx, ".collector::a::discard", "", what)


def typed_stores(ptx: str) -> tuple[str, list[Edit]]:
    """With the final state's `st.global.b32` as `st.global.f32`: the same bits, and a number to the equality prover."""
    return _replace(ptx, "st.global.b32", "st.global.f32", "st.global.b32 written st.global.f32, the same bits")


def instructions(ptx: str) -> list[tuple[int, str]]:
    """(line number, text) of every instruction and label, without predicates and comments."""
    found = []
    for number, line in enumerate(ptx.split("\n"), 1):
        line = line.split("//")[0].strip()
        if line and not line.startswith((".", "{", "}")) or line.startswith("{."):
            found.append((number, re.sub(r"^@!?%?\w+\s+", "", line)))
    return found


def unfenced_stores(ptx: str) -> list[str]:
    """Shared-memory matrix stores handed to the async proxy without `fence.proxy.async` in between (PTX manual,
    "Async proxy"): between a stmatrix and the next barrier, arrive, commit, bulk copy or jump there must be one."""
    faults, store = [], 0
    for number, text in instructions(ptx):
        if text.startswith("stmatrix"):
            store = store or number
        elif text.startswith("fence.proxy.async"):
            store = 0
        elif store and (text.startswith((*HANDS_OVER, "bra", "ret")) or text.endswith(":")):
            faults.append(f"line {number}: {text.split()[0]} after the stmatrix of line {store} with no proxy fence")
            store = 0
    return faults


def unwaited_loads(ptx: str) -> list[str]:
    """Tensor-memory loads whose registers are read, or whose accumulator is handed over, before `tcgen05.wait::ld`
    (PTX manual, tcgen05.ld: asynchronous until the wait). A `mov` that only packs such registers passes the duty on:
    the compiler pairs them up right after the load, and the assembler lets the pairs vanish."""
    faults, pending = [], {}
    for number, text in instructions(ptx):
        if text.startswith("tcgen05.wait::ld"):
            pending = {}
            continue
        if text.startswith("tcgen05.ld"):
            pending |= dict.fromkeys(re.findall(r"%\w+", text.split("}")[0]), number)
            continue
        if not pending:
            continue
        used = next((r for r in re.findall(r"%\w+", text) if r in pending), None)
        if used and text.startswith("mov."):
            pending |= dict.fromkeys(re.findall(r"%\w+", text.split(",")[0]), pending[used])
            continue
        if used or text.startswith((*HANDS_OVER, "bra", "ret")) or text.endswith(":"):
            load = pending[used] if used else max(pending.values())
            faults.append(f"line {number}: {text.split()[0]} after the tcgen05.ld of line {load} with no wait::ld")
            pending = {}
    return faults
