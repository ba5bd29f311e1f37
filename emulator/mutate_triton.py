"""What finds a synchronisation that is missing from a Triton kernel: each instruction removed in turn, from the PTX that
Triton compiled for 004's intra stage.

    python -m emulator.mutate_triton                    both architectures; exit code 1 if a survivor is not justified
    python -m emulator.mutate_triton sm_90a --only fence
    python -m emulator.mutate_triton --table            both, written to MUTATIONS.md

The kernel runs once as the rung launches it (K = V = 64, bf16, one head, one chunk of 60 tokens, two turns of each loop
over K); its launch is kept and repeated with each mutant's text (mutants.py, the kinds that remove something), under the
fixed schedule and then a seeded one. What finds a mutant is what mutate.py says, but for `numbers`: the outputs differ
from the clean kernel's in some bit, for a kernel fixes every order of its arithmetic. Triton 3.9 leaves waits for
tcgen05.ld to the assembler, so an early use alone is an error only where the clean kernel has none. Survivors need a
line in survivors_triton.yaml. Rungs 002 and 003 fill Aqk's upper part with a Triton kernel that has nothing to remove.

Compiling and launching for an architecture takes a process of its own (triton_driver.activate).
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import torch
import yaml

from kernels.kda import inputs, oracle
from kernels.kda.cases import Case
from kernels.kda.contract import CHUNK

from .launch import Device, decode
from .memory import GlobalMemory
from .memwatch import MemoryWatch
from .mutants import Mutant, enumerate_removals
from .mutate import BY, ROOT, Outcome, Subject, _coarse, _limit, _row, _show, _source, _write

ARCHS = ("sm_90a", "sm_100a")
FOLDER = ROOT / "ideas" / "004-prezeroed-aqk"
OUTPUTS = ("Aqk", "w", "u", "qg", "kg")
K = V = 64
TOKENS = 60
HANG_S = 60
SEEDS = (None, 1)  # of two schedules: the watchers judge the order that the program guarantees, not the one a run took
HEADING = "\n## The Triton kernel of 004\n"


@dataclass(frozen=True)
class Launch:
    """One recorded launch. pointers: byte offset in the parameter block -> name of the tensor whose address stands there."""

    text: str
    kernel: str
    grid: tuple
    block: int
    smem: int
    params: bytes
    pointers: dict[int, str]


@cache
def recorded(arch: str) -> Launch:
    """The launch of 004's intra kernel for `arch`, compiled and captured in a process of its own."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_record, arch).result()


def _record(arch: str) -> Launch:
    from _common.cute import import_source

    from . import triton_driver

    device, seen = triton_driver.activate(arch), []

    def launch(text, kernel, grid, block, smem, params, cluster=(1, 1, 1), memory=None):
        seen.append((text, kernel, grid, block, smem, params))

    device.launch = launch
    given = operands()
    out = import_source(FOLDER / "intra.py").intra_fused(*given.values(), K ** -0.5, bounded=True, arch=arch)
    ((text, kernel, grid, block, smem, params),) = seen
    names = {t.data_ptr(): name for name, t in (*given.items(), *out.items())}
    pointers = [p.offset for p in decode(text).kernels[kernel].params if p.size == 8]
    at = {offset: int.from_bytes(params[offset : offset + 8], "little") for offset in pointers}
    return Launch(text, kernel, grid, block, smem, params, {o: names[x] for o, x in at.items() if x in names})


@cache
def operands() -> dict[str, torch.Tensor]:
    """q, k, v, g2 (log2 units, cumulated within a chunk) and beta of one head, as the stages before leave them."""
    case = Case("mutants", 1, TOKENS, 1, 1, K, V, initial_state=False, gpu=False)
    call = inputs.make(case, "slow", "pre", 0).call()
    io = call["q"].dtype
    g = oracle.prepare(**call, dtype=torch.float32).g
    g2 = torch.cat([part.cumsum(1) for part in g.split(CHUNK, 1)], 1) * 1.4426950408889634
    return {"q": call["q"], "k": call["k"], "v": call["v"].to(io), "g2": g2.contiguous(), "beta": call["beta"].to(io)}


class Stage(Subject):
    """004's intra kernel for an architecture. What mutate.Subject does with mutants, on a recorded launch."""

    def __init__(self, arch: str):
        self.rung, self.arch, self.source = "004", arch, FOLDER / "intra.py"
        self.launch = recorded(arch)
        self.ptx, self.kernel = self.launch.text, self.launch.kernel
        self.barriers: dict[int, set[int]] = {}
        self._mutants = enumerate_removals(self.ptx, self.kernel)
        self.early: set[int] | None = None
        self.clean = self.run()
        self.early = set(self.lines)

    def run(self, ptx=None, seed=None, watch=None, mutant=None):
        """The outputs of one launch, in the order of OUTPUTS."""
        given, memory = operands(), GlobalMemory()
        widths = {"Aqk": CHUNK, "w": K, "u": V, "qg": K, "kg": K}
        out = {name: torch.full((1, TOKENS, 1, widths[name]), float("nan"), dtype=torch.bfloat16) for name in OUTPUTS}
        for w in getattr(watch, "watchers", ()):
            if isinstance(w, MemoryWatch):
                for name, tensor in given.items():
                    w.protect(tensor, name)
                for name, tensor in out.items():
                    w.fresh(tensor, name)
        params = bytearray(self.launch.params)
        for offset, name in self.launch.pointers.items():
            tensor = given[name] if name in given else out[name]
            params[offset : offset + 8] = memory.add(tensor, name).to_bytes(8, "little")
        device = Device(self.arch, seed, watch)
        device.strict_waits = False
        x = self.launch
        with _limit(HANG_S):
            device.launch(ptx or self.ptx, x.kernel, x.grid, x.block, x.smem, bytes(params), memory=memory)
        self.lines = device.stats[0]["early_uses"]
        return tuple(out[name] for name in OUTPUTS)

    def judge(self, *answer) -> str:
        """Why the outputs, or the early uses of tcgen05.ld's results, are not the clean kernel's; "" where they are."""
        if more := sorted(set(self.lines) - self.early):
            return f"uses results of tcgen05.ld before their wait, where the clean kernel does not: PTX line {more[0]}"
        wrong = [name for name, now, then in zip(OUTPUTS, answer, self.clean)
                 if not torch.equal(now.view(torch.int16), then.view(torch.int16))]  # fmt: skip
        return f"{', '.join(wrong)}: not the clean kernel's bits" if wrong else ""


# ---- judging ----


@cache
def _reasons() -> dict[str, dict[str, str]]:
    return yaml.safe_load(Path(__file__).with_name("survivors_triton.yaml").read_text())


def justification(arch: str, mutant: Mutant) -> str | None:
    """Why this mutant may survive, or None."""
    return _reasons().get(arch, {}).get(mutant.name)


def verdict(arch: str, o: Outcome) -> str:
    """Why an outcome is a failure, or ""."""
    reason = justification(arch, o.mutant)
    if o.by is None and reason is None:
        return f"{arch}: {o.mutant.name} survives: line {o.mutant.line}, {o.mutant.text}"
    if o.by is not None and reason is not None:
        return f"{arch}: {o.mutant.name} is justified as a survivor, but found: {o.message[:200]}"
    return ""


def sweep(arch: str, only: str = "", on_outcome: Callable[[Outcome], None] = lambda o: None) -> list[Outcome]:
    """Try every removal whose name contains `only`."""
    stage, outcomes = Stage(arch), []
    for mutant in stage.mutants:
        if only in mutant.name:
            outcomes.append(stage.try_mutant(mutant, SEEDS))
            on_outcome(outcomes[-1])
    return outcomes


def table(results: dict[str, list[Outcome]]) -> str:
    """The section of MUTATIONS.md."""
    said = " ".join(__doc__.split("\n\n")[2].split())
    parts = [HEADING, "Written by `python -m emulator.mutate_triton --table`. " + said + "\n"]
    parts += [_row("arch", "kind", "mutants", *BY[:-1], "survivors"), _row(*["---"] * (3 + len(BY)))]
    for arch, outcomes in results.items():
        for kind in dict.fromkeys(o.mutant.kind for o in outcomes):
            count = Counter(o.by for o in outcomes if o.mutant.kind == kind)
            parts.append(_row(arch, kind, sum(count.values()), *(count[by] for by in BY[:-1]), count[None]))
    for arch, outcomes in results.items():
        parts += ["", f"## 004 intra, {arch}\n"]
        parts += [_row("mutant", "PTX line", "source line", "found by", "seed", "its message points at, or why it survives"),
                  _row(*["---"] * 6)]  # fmt: skip
        parts += [_row(o.mutant.name, o.mutant.line, _source(o), o.by or "-", "" if o.seed is None else o.seed,
                       _coarse(o.place) if o.by else justification(arch, o.mutant) or "**not justified**")
                  for o in outcomes]  # fmt: skip
    return "\n".join(parts) + "\n"


def main(arguments: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="python -m emulator.mutate_triton", description=__doc__.split("\n\n")[0])
    p.add_argument("arch", nargs="?", choices=ARCHS, help="one architecture; both without it")
    p.add_argument("--only", default="", help="mutants whose name contains this")
    p.add_argument("--table", action="store_true", help="write the section of MUTATIONS.md (needs the whole sweep)")
    a = p.parse_args(arguments)
    if a.table and (a.arch or a.only):
        p.error("--table: takes the whole sweep, no architecture and no --only")
    archs = [a.arch] if a.arch else ARCHS
    results = {arch: sweep(arch, a.only, partial(_show, "004", arch)) for arch in archs}
    faults = [f for arch, outcomes in results.items() for o in outcomes if (f := verdict(arch, o))]
    print(*faults, sep="\n")
    if a.table:
        path = Path(__file__).with_name("MUTATIONS.md")
        _write(path, path.read_text().partition(HEADING)[0] + table(results))
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
