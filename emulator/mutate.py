"""What finds a planted fault: every mutant (mutants.py) of the state kernels of rungs 002 to 004, run and judged.

    python -m emulator.mutate                     the whole sweep; exit code 1 if a survivor is not justified
    python -m emulator.mutate 003 sm_100a         one kernel
    python -m emulator.mutate --table             the whole sweep, written to MUTATIONS.md

A mutant runs on one small problem (one head, one V tile, more chunks than any ring has slots, a partial last chunk,
strong gates at the ends of chunks so that a decay one row off is a different number), watched for races, with strict
waits: the fixed schedule first, then seeded ones until something finds it. In this order it is found by

    protocol   an error of the emulator (errors.py) other than the next
    deadlock   no warp can go on
    race       a finding of races.Races
    memory     a finding of memwatch.MemoryWatch: mbarrier storage, barrier counts at the end, global memory
    numbers    o or the final state miss the budget of kernels/kda/budget.py against the fp64 oracle
    proof      a survivor on sm_100a: SentryWard's verdict on it (ladder/verify.py)

and its message says a place: the PTX line or source line of the fault or the nearest one it names. A survivor needs a
line in survivors.yaml that says why; one that is found although it has such a line is a failure, too.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import yaml

from _common.cute import Unit
from kernels.kda import budget, inputs, oracle
from kernels.kda.cases import Case
from kernels.kda.contract import CHUNK

from .cute_host import EmulatedTarget
from .errors import Deadlock, EmulatorError
from .hw import tensormap
from .launch import Device, decode
from .memwatch import MemoryWatch
from .mutants import Mutant, enumerate_mutants
from .races import Races
from .watch import Together, Watch

ROOT = Path(__file__).resolve().parents[1]
RUNGS = {"002": "002-cute-fused", "003": "003-cute-pipeline", "004": "004-prezeroed-aqk"}
SOURCES = {"sm_90a": "state_sm90.py", "sm_100a": "state_sm100.py"}
K, V, TAIL = 128, 64, 60  # the last chunk has TAIL tokens: some in each of a tile's four quarters
CHUNKS = {("002", "sm_90a"): 4, ("002", "sm_100a"): 4, ("003", "sm_90a"): 10, ("003", "sm_100a"): 8}
CHUNKS |= {("004", arch): CHUNKS["003", arch] for arch in SOURCES}  # each ring wraps twice, and a bit
SEEDS = (None, 1, 2, 3)
HANG_S = 120


@dataclass(frozen=True)
class Outcome:
    """by: what found the mutant, or None. message: the error, or the finding nearest to the fault. place: where all
    that was said points, relative to the fault."""

    mutant: Mutant
    by: str | None
    seed: int | None
    message: str = ""
    place: str = ""
    seconds: float = 0.0


class Problem:
    """One head: the state stage's operands, as fla's stages round them, the exact answer and its budget."""

    def __init__(self, chunks: int, tail: int = TAIL, K: int = K, V: int = V, seed: int = 0):
        case = Case("mutants", 1, CHUNK * (chunks - 1) + tail, 1, 1, K, V, initial_state=True, gpu=False)
        call = inputs.make(case, "slow", "pre", seed).call()
        rows = torch.arange(case.T) % CHUNK
        ends = (rows == 0) | (rows == CHUNK - 1) | (torch.arange(case.T) == case.T - 1)
        call["g"] = torch.where(ends[None, :, None, None], -0.5, call["g"])
        self.scale = K**-0.5
        self.reference = budget.reference(oracle.chunked(**call), **call)
        self.operands = state_operands(call)

    def outputs(self) -> tuple[torch.Tensor, torch.Tensor]:
        nan = float("nan")
        u, h0 = self.operands["u"], self.operands["h0"]
        return torch.full_like(u, nan), torch.full_like(h0, nan)

    def judge(self, o: torch.Tensor, ht: torch.Tensor) -> str:
        """Why the outputs are wrong, or ""."""
        return "; ".join(v.reason for v in budget.judge(o, ht, self.reference) if not v.passed)


def state_operands(call: dict) -> dict[str, torch.Tensor]:
    """qg, w, kg, u, Aqk, g2 (log2 units), h0 of a contract call, rounded where fla's stages round
    (kernels/kda/ALGORITHM.md)."""
    io = call["q"].dtype
    x = oracle.prepare(**call, dtype=torch.float32)
    B, T, HV, K = x.q.shape
    out = {n: torch.empty(B, T, HV, K, dtype=io) for n in ("qg", "w", "kg")}
    out |= {"u": torch.empty_like(x.v, dtype=io), "Aqk": torch.zeros(B, T, HV, CHUNK, dtype=io)}
    out["g2"] = torch.empty(B, T, HV, K)
    for start in range(0, T, CHUNK):
        at = slice(start, start + CHUNK)
        q, k, v, g, beta = (t[:, at].transpose(1, 2) for t in (x.q, x.k, x.v, x.g, x.beta))
        G = g.cumsum(2)
        decay = oracle.pairwise_decay(G)
        Aqk = x.scale * torch.einsum("bhik,bhijk,bhjk->bhij", q, decay, k)
        Akk = torch.einsum("bhik,bhijk,bhjk->bhij", beta[..., None] * k, decay, k).tril(-1)
        eye = torch.eye(G.shape[2]).expand_as(Akk)
        inverse = torch.linalg.solve_triangular(eye + Akk, eye, upper=False, unitriangular=True).to(io).float()
        w, u = (inverse @ (beta[..., None] * t).to(io).float() for t in (k * G.exp(), v))
        found = {"qg": q * G.exp(), "w": w, "kg": k * (G[:, :, -1:] - G).exp(), "u": u, "g2": G / math.log(2)}
        for name, value in found.items():
            out[name][:, at] = value.transpose(1, 2).to(out[name].dtype)
        out["Aqk"][:, at, :, : Aqk.shape[-1]] = Aqk.transpose(1, 2).to(io)
    return {n: out[n] for n in ("qg", "w", "kg", "u", "Aqk", "g2")} | {"h0": x.state}


# ---- running ----


class _Maps(Device):
    """A device that drops the swizzle of one tensor map among the parameters of what it launches."""

    drop: int | None = None

    def launch(self, text, kernel, grid, block, smem, params, cluster=(1, 1, 1), memory=None):
        if self.drop is not None:
            at = decode(text).kernels[kernel].params[self.drop].offset
            m = tensormap.decode(params[at : at + 128])
            raw = tensormap.encode(address=m.address, dtype=m.dtype, dims=m.dims, strides=m.strides, box=m.box,
                                   swizzle="none", fill=m.fill, estrides=m.estrides)  # fmt: skip
            params = params[:at] + raw + params[at + 128 :]
        return super().launch(text, kernel, grid, block, smem, params, cluster, memory)


class _Uses(Watch):
    """Which mbarriers each PTX line works on, and where bulk loads write."""

    def __init__(self):
        self.barriers: dict[int, set[int]] = {}
        self.tiles: set[int] = set()

    def mbarrier(self, machine, f, ins, event, cta, offset, detail):
        op = machine.performing
        if ins is None and op is not None:
            ins = op.ins
        if ins is not None:
            self.barriers.setdefault(ins.line, set()).add(offset)

    def async_access(self, machine, op, kind, space, cta, address, nbytes, warp=None):
        if space == "shared" and kind == "write":
            self.tiles.add(int(address.min()))


class Subject:
    """The state kernel of a rung for an architecture, on a problem."""

    def __init__(self, rung: str, arch: str, problem: Problem):
        self.rung, self.arch, self.problem = rung, arch, problem
        self.source = ROOT / "ideas" / RUNGS[rung] / SOURCES[arch]
        x = problem.operands
        params = [("K", x["qg"].shape[-1]), ("V", x["u"].shape[-1]), ("dtype", "bfloat16"), ("has_h0", True)]
        if arch == "sm_90a" and rung != "002":
            params.append(("v_tile", 64))
        self.target = EmulatedTarget(arch, device=_Maps(arch))
        self.function = self.target.load(Unit("kda_state", self.source, arch, tuple(params)))
        self.ptx = self.function.ptx
        (self.kernel,) = decode(self.ptx).kernels
        self._mutants: list[Mutant] | None = None

    def run(self, ptx: str | None = None, seed: int | None = None, watch: Watch | None = None,
            mutant: Mutant | None = None) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """(o, ht) of one launch."""
        device = _Maps(self.arch, seed, watch)
        device.drop = mutant.tensor_map if mutant else None
        self.target.device = device
        self.function.ptx = ptx or self.ptx
        operands = dict(self.problem.operands)
        if mutant and mutant.operand:
            a = operands[mutant.operand] = operands[mutant.operand].clone()
            row = torch.arange(a.shape[1]) % CHUNK
            a[0, torch.arange(CHUNK)[None, :].gt(row[:, None])[:, None, :].expand(-1, a.shape[2], -1)] = float("nan")
        o, ht = self.problem.outputs()
        for w in getattr(watch, "watchers", ()):
            if isinstance(w, MemoryWatch):
                for name, tensor in operands.items():
                    w.protect(tensor, name)
                w.fresh(o, "o")
                w.fresh(ht, "ht")
        with _limit(HANG_S):
            self.function(*operands.values(), o, ht, self.problem.scale)
        return o, ht

    @property
    def mutants(self) -> list[Mutant]:
        if self._mutants is None:
            uses = _Uses()
            self.run(watch=uses)
            maps = self._tensor_maps()
            self._mutants = enumerate_mutants(self.ptx, self.kernel, uses.barriers, sorted(uses.tiles), maps, ("Aqk",))
            self.barriers = uses.barriers
        return self._mutants

    def _tensor_maps(self) -> dict[int, str]:
        found = {}

        class Look(Device):
            def launch(self, text, kernel, grid, block, smem, params, cluster=(1, 1, 1), memory=None):
                for i, p in enumerate(decode(text).kernels[kernel].params):
                    if p.size == 128:
                        found[i] = tensormap.decode(params[p.offset : p.offset + 128]).swizzle

        self.target.device = Look(self.arch)
        self.function(*self.problem.operands.values(), *self.problem.outputs(), self.problem.scale)
        return found

    def judge(self, *answer: torch.Tensor) -> str:
        """Why the outputs are wrong, or ""."""
        return self.problem.judge(*answer)

    def try_mutant(self, mutant: Mutant, seeds: tuple[int | None, ...] = SEEDS) -> Outcome:
        """Run under one schedule after another until something finds it."""
        started, ptx = time.monotonic(), mutant.apply(self.ptx)
        for seed in seeds:
            races, memory = Races(), MemoryWatch()
            by, message = None, ""
            try:
                answer = self.run(ptx, seed, Together(races, memory), mutant)
            except Deadlock as error:
                by, message = "deadlock", str(error)
            except EmulatorError as error:
                by, message = "protocol", f"{type(error).__name__}: {error}"
            except TimeoutError as error:
                by, message = "hang", str(error)
            else:
                found = races.report() or memory.report()
                if found:
                    by, message = "race" if races.findings else "memory", _nearest(found, mutant)
                elif reason := self.judge(*answer):
                    by, message = "numbers", reason
            if by:
                place = self.place(mutant, "\n".join([message, *races.report(), *memory.report()]))
                return Outcome(mutant, by, seed, message, place, time.monotonic() - started)
        return Outcome(mutant, None, None, seconds=time.monotonic() - started)

    def place(self, mutant: Mutant, message: str) -> str:
        """How near to the fault the message points."""
        if not mutant.line:
            return "names no place" if "PTX line" not in message else "its consumer"
        lines = [int(n) for n in re.findall(r"PTX line (\d+)", message)]
        sources = [int(n) for n in re.findall(rf"{self.source.name}:(\d+)", message)]
        barriers = self.barriers.get(mutant.line, set()) | set(mutant.barriers or ())
        changed = {mutant.line, *(n for n, text in mutant.edits if text)}
        if changed & set(lines):
            return "its line"
        if mutant.source and mutant.source[1] in sources:
            return "its source line"
        if any(re.search(rf"0x{offset:x}\b", message) for offset in barriers):
            return "its barrier"
        nearest = min((abs(n - mutant.line) for n in lines), default=None)
        if nearest is None:
            return "none"
        return f"{nearest} PTX lines away"


def _nearest(found: list[str], mutant: Mutant) -> str:
    def distance(message: str) -> int:
        return min((abs(int(n) - mutant.line) for n in re.findall(r"PTX line (\d+)", message)), default=1 << 30)

    return min(found, key=distance)


@contextlib.contextmanager
def _limit(seconds: int) -> Iterator[None]:
    """Raise TimeoutError in the main thread after `seconds`."""

    def stop(*_):
        raise TimeoutError(f"still running after {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


# ---- judging ----


def prove(rung: str, mutant: Mutant, tokens: int = 3 * CHUNK) -> str:
    """SentryWard's verdict on a mutant of a Blackwell kernel at `tokens`, by default one chunk more than its rings have
    slots: "race free", or what it found."""
    from ladder import verify
    from ladder.verify_input import Shape, record

    launch = record(verify.state_unit(ROOT / "ideas" / RUNGS[rung], "sm_100a"), Shape(tokens))
    rows = list(verify.races(replace(launch, ptx=mutant.apply(launch.ptx))))
    bad = [f"{name}: {reason}" for name, outcome, reason, _ in rows if outcome != verify.PASSED]
    return re.sub(r"; edits: [^;]*", "", "; ".join(bad)) or "race free"


def verdict(rung: str, arch: str, outcome: Outcome) -> str:
    """Why an outcome is a failure, or "": a survivor without a reason, or one with a reason that was found."""
    reason = justification(rung, arch, outcome.mutant)
    if outcome.by is None and reason is None:
        return f"{rung} {arch}: {outcome.mutant.name} survives: line {outcome.mutant.line}, {outcome.mutant.text}"
    if outcome.by is not None and reason is not None:
        return f"{rung} {arch}: {outcome.mutant.name} is justified as a survivor, but found: {outcome.message[:200]}"
    return ""


def justification(rung: str, arch: str, mutant: Mutant) -> str | None:
    """Why this mutant may survive, from survivors.yaml, or None."""
    reasons = yaml.safe_load(Path(__file__).with_name("survivors.yaml").read_text())
    return reasons.get(f"{_original(rung, arch)} {arch}", {}).get(mutant.name)


def _original(rung: str, arch: str) -> str:
    """004's state kernels are 003's, byte for byte, unless someone changes one of them."""
    theirs, ours = (ROOT / "ideas" / RUNGS[r] / SOURCES[arch] for r in ("003", rung))
    return "003" if rung == "004" and theirs.read_bytes() == ours.read_bytes() else rung


_subject: Subject | None = None


def _start(rung: str, arch: str) -> None:
    global _subject
    torch.set_num_threads(1)
    _subject = Subject(rung, arch, Problem(CHUNKS[rung, arch]))


def _try(index: int) -> Outcome:
    assert _subject is not None
    return _subject.try_mutant(_subject.mutants[index])


def sweep(rung: str, arch: str, only: str = "", jobs: int = 1,
          on_outcome: Callable[[Outcome], None] = lambda outcome: None) -> list[Outcome]:  # fmt: skip
    """Try every mutant of one kernel whose name contains `only`; on sm_100a SentryWard judges the survivors."""
    subject = Subject(rung, arch, Problem(CHUNKS[rung, arch]))
    chosen = [i for i, m in enumerate(subject.mutants) if only in m.name]
    outcomes = []
    with multiprocessing.get_context("spawn").Pool(jobs, _start, (rung, arch)) as pool:
        for outcome in pool.imap(_try, chosen):
            if outcome.by is None and arch == "sm_100a" and outcome.mutant.edits:
                said = prove(rung, outcome.mutant)
                by = None if said == "race free" else "proof"
                outcome = replace(outcome, by=by, message=f"SentryWard: {said}")
            outcomes.append(outcome)
            on_outcome(outcome)
    return outcomes


# ---- the table ----

BY = ("protocol", "deadlock", "race", "memory", "hang", "numbers", "proof")


def table(results: dict[tuple[str, str], list[Outcome]]) -> str:
    """MUTATIONS.md."""
    said = __doc__.split("\n\n", 2)[2].strip()
    chunks = ", ".join(f"{n} for {rung} on {arch}" for (rung, arch), n in CHUNKS.items())
    parts = [
        "# Mutants of the state kernels, and what found them\n",
        "Written by `python -m emulator.mutate --table`; what the kinds mean stands in `mutants.py`.\n",
        said + "\n",
        f"Problem: K = {K}, V = {V}, bf16, one head; chunks: {chunks}; the last has {TAIL} tokens.\n",
        "## Totals\n",
        _row("rung", "arch", "mutants", *BY, "survivors"),
        _row(*["---"] * (4 + len(BY))),
    ]
    for (rung, arch), outcomes in results.items():
        count = Counter(o.by for o in outcomes)
        parts.append(_row(rung, arch, len(outcomes), *(count[by] for by in BY), count[None]))
    parts += ["", "## By kind, all kernels\n", _row("kind", "mutants", *BY, "survivors")]
    parts.append(_row(*["---"] * (3 + len(BY))))
    every = [o for outcomes in results.values() for o in outcomes]
    for kind in dict.fromkeys(o.mutant.kind for o in every):
        count = Counter(o.by for o in every if o.mutant.kind == kind)
        parts.append(_row(kind, sum(count.values()), *(count[by] for by in BY), count[None]))
    parts += ["", "## Where the messages point\n", _row("found by", *PLACES), _row(*["---"] * (1 + len(PLACES)))]
    for by in BY:
        count = Counter(_coarse(o.place) for o in every if o.by == by)
        parts.append(_row(by, *(count[p] for p in PLACES)))
    parts += ["", "## Survivors\n", _row("rung", "arch", "mutant", "line", "source", "why"), _row(*["---"] * 6)]
    for (rung, arch), outcomes in results.items():
        for o in outcomes:
            if o.by is None:
                why = justification(rung, arch, o.mutant) or "**not justified**"
                parts.append(_row(rung, arch, o.mutant.name, o.mutant.line, _source(o), f"{why} {o.message}".strip()))
    for (rung, arch), outcomes in results.items():
        parts += ["", f"## {rung}, {arch}\n"]
        if _original(rung, arch) != rung:
            parts.append(f"The kernel is {_original(rung, arch)}'s, byte for byte: see there.")
            continue
        parts += [_row("mutant", "PTX line", "source line", "found by", "seed", "its message points at"),
                  _row(*["---"] * 6)]  # fmt: skip
        parts += [_row(o.mutant.name, o.mutant.line or "", _source(o), o.by or "-", "" if o.seed is None else o.seed,
                       o.place) for o in outcomes]  # fmt: skip
    return "\n".join(parts) + "\n"


PLACES = ("its line", "its source line", "its barrier", "at most 30 PTX lines away", "further away", "no place")


def _coarse(place: str) -> str:
    if place in PLACES:
        return place
    if away := re.match(r"(\d+) PTX lines", place):
        return PLACES[3] if int(away[1]) <= 30 else PLACES[4]
    return PLACES[5]


def _source(o: Outcome) -> str:
    return f"{Path(o.mutant.source[0]).name}:{o.mutant.source[1]}" if o.mutant.source else ""


def _row(*cells: object) -> str:
    return "| " + " | ".join(str(c).replace("|", "\\|").replace("\n", " ") for c in cells) + " |"


def main(arguments: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="python -m emulator.mutate", description=__doc__.split("\n", 1)[0])
    p.add_argument("rung", nargs="?", choices=RUNGS, help="one rung; all without it")
    p.add_argument("arch", nargs="?", choices=SOURCES, help="one architecture; both without it")
    p.add_argument("--only", default="", help="mutants whose name contains this")
    p.add_argument("--jobs", type=int, default=1, help="processes")
    p.add_argument("--table", action="store_true", help="write MUTATIONS.md (needs the whole sweep)")
    a = p.parse_args(arguments)
    if a.table and (a.rung or a.only):
        p.error("--table: takes the whole sweep, no rung and no --only")
    results, faults = {}, []
    for rung in [a.rung] if a.rung else RUNGS:
        for arch in [a.arch] if a.arch else SOURCES:
            same = results.get((_original(rung, arch), arch))
            results[rung, arch] = same or sweep(rung, arch, a.only, a.jobs, lambda o, r=rung, x=arch: _show(r, x, o))
            faults += [f for o in results[rung, arch] if (f := verdict(rung, arch, o))]
    print(*faults, sep="\n")
    if a.table:
        path = Path(__file__).with_name("MUTATIONS.md")
        _, heading, triton = path.read_text().partition("\n## The Triton kernel of 004\n")  # mutate_triton's
        _write(path, table(results) + heading + triton)
    return int(bool(faults))


def _show(rung: str, arch: str, o: Outcome) -> None:
    print(f"{rung} {arch:8} {o.mutant.name:44} {o.by or 'SURVIVES':9} {o.place:24} {o.seconds:5.1f} s  "
          f"{o.message[:150]!r}", flush=True)  # fmt: skip


def _write(path: Path, text: str) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(handle, "w") as f:
        f.write(text)
    os.chmod(temporary, 0o644)
    os.replace(temporary, path)


if __name__ == "__main__":
    sys.exit(main())
