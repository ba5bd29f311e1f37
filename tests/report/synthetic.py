"""Synthetic records for tests of the report: made up, written to a temporary folder only, never measured.

Times follow a simple model (floor x a factor per rung) with seeded noise, so that every layout has something to show.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from pathlib import Path

from ladder.manifest import Ladder, load

NOW = datetime(2026, 3, 1, 12, tzinfo=timezone.utc)
CASES = {
    "t2048_h12": (1, 2048, 12, 128, 128),
    "t8192_h24": (1, 8192, 24, 128, 128),
    "h64": (1, 8192, 64, 128, 128),
    "h96": (1, 8192, 96, 128, 128),
    "b8_h16_t4096": (8, 4096, 16, 128, 128),
    "t32768_h32": (1, 32768, 32, 128, 128),
    "train": (16, 8192, 16, 128, 256),
}
IDEAS = [
    "fla's forward as its separate stages",
    "scan and output in one plain kernel: h never leaves registers",
    "warp-specialised pipeline: producer, recurrence and epilogue overlap",
    "zero-padded Aqk from the intra stage",
    "one kernel for gate, normalise and intra",
    "split V over a cluster",
    "exact segmented scan",
    "persistent grid with <b>ampersands & angle</b> brackets",
]
RIVALS = {"fla": (9.0, 9.2), "fla-safe": (7.4, 7.6), "cudnn:kda_hopper_cuda": (4.4, 12.5)}
STAGES = ("normalise", "gate", "intra", "wu", "scan", "output")


@dataclass
class Plan:
    """What to make: `statuses` one per rung."""

    statuses: list[str]
    devices: list[tuple[str, str]] = field(default_factory=lambda: [("NVIDIA H200", "sm_90a")])
    rivals: bool = True
    stale: set[int] = field(default_factory=set)
    unbenched: set[int] = field(default_factory=set)
    failing: set[int] = field(default_factory=set)


def make(root: Path, plan: Plan) -> Ladder:
    """A ladder under `root` with records as planned."""
    lines = ["cases:"]
    for name, (b, t, h, k, v) in CASES.items():
        lines.append(f"  {name}: {{B: {b}, T: {t}, H: {h}, K: {k}, V: {v}, gpu: true}}")
    lines.append("rungs:" if plan.statuses else "rungs: []")
    for i, status in enumerate(plan.statuses):
        n = i + 1
        lines += [
            f"  - number: {n}",
            f"    slug: rung-{chr(97 + i)}",
            f"    parent: {max(1, n - 1)}",
            f"    idea: {json.dumps(IDEAS[i % len(IDEAS)])}",
            f"    status: {status}",
            "    archs: [sm_90a, sm_100a]",
            f"    replaces: {'[scan, output]' if i else '[]'}",
        ]
        if status == "falsified":
            lines.append('    reason: "the extra barrier costs more than the overlap gains: 1.08x at h96"')
    (root / "ladder.yaml").write_text("\n".join(lines) + "\n")
    ladder = load(root)
    for rung in ladder.rungs.values():
        folder = ladder.folder(rung)
        (folder / "records").mkdir(parents=True)
        (folder / "kernel.py").write_text(f'"""{rung.name}"""\n')
        for d, (device, arch) in enumerate(plan.devices):
            rng = random.Random(rung.number * 100 + d)
            if rung.number not in plan.unbenched:
                _write(folder, _bench(rng, rung, plan, device, arch, d))
            _write(folder, _check(rng, rung, plan, device, arch))
        _write(folder, _check(random.Random(rung.number), rung, plan, "CPU (emulated)", "sm_90a"))
    return ladder


def stale_of(plan: Plan):
    """The staleness that `plan` asks for, in place of hashing files."""
    return lambda rec: "the code has changed since (was 0000, is 1111)" if rec["number"] in plan.stale else None


def _write(folder: Path, rec: dict) -> None:
    n = len(list((folder / "records").iterdir()))
    (folder / "records" / f"{rec['kind']}-{n}.json").write_text(json.dumps(rec))


def _base(kind: str, rung, device: str, arch: str, hours: float) -> dict:
    return {
        "schema": 1,
        "kind": kind,
        "rung": rung.name,
        "number": rung.number,
        "parent": f"parent-{rung.parent}",
        "code_hash": f"{rung.number:016x}",
        "parent_hash": "",
        "timing_version": 1,
        "commit": "0123456789abcdef",
        "dirty": rung.number == 2,
        "date": (NOW - timedelta(hours=hours)).isoformat(),
        "versions": {"torch": "2.11.0", "triton": "3.6.0"},
        "copy_gbps": 4260.0,
        "command": "synthetic",
        "complete": True,
        "device": {"name": device, "arch": arch, "driver": "580.1", "sms": 132, "memory": 150_000_000_000},
    }


def _bench(rng: random.Random, rung, plan: Plan, device: str, arch: str, slower: int) -> dict:
    rec = _base("bench", rung, device, arch, 30 * (len(plan.statuses) - rung.number) + 2)
    rec["cells"] = []
    for case, (b, t, h, k, v) in CASES.items():
        for form in ("prod", "pre"):
            regimes = ("strong", "slow", "mixed", "init") if case in ("h96", "t8192_h24") else ("strong", "slow")
            for regime in regimes:
                rec["cells"].append(
                    _cell(
                        rng, rung, plan, (case, b * t * h * (3 * k + 2 * v) * 2 / 4.26e12 * 1e3, regime, form), slower
                    )
                )
    return rec


def _cell(rng: random.Random, rung, plan: Plan, where: tuple, slower: int) -> dict:
    case, floor, regime, form = where
    few = 1 + 3 * (case == "t2048_h12")
    factor = lambda n: 9 * few * 0.72 ** (n - 1) + 1.2  # noqa: E731
    own = factor(rung.number) * (1.5 if rung.status == "falsified" else 1)
    rounds = range(15)
    drift = [rng.gauss(1, 0.02) for _ in rounds]

    def times(multiple: float) -> list[float]:
        return [floor * multiple * (1 + slower) * drift[i] * rng.gauss(1, 0.006) for i in rounds]

    samples = {"rung": times(own), "parent": times(factor(max(1, rung.number - 1)))}
    samples["control"] = [x * rng.gauss(1, 0.006) for x in samples["parent"]]
    clocks, absent = dict.fromkeys(samples, "graph"), {"kernel-fun": "needs sm_100, this GPU is sm_90"}
    if plan.rivals:
        for name, (strong, slow) in RIVALS.items():
            if form == "pre" and name.startswith("cudnn"):
                absent[name] = "form pre is not in its interface"
                continue
            samples[name] = times((strong if regime == "strong" else slow) * few)
            clocks[name] = "events" if name == "fla" else "graph"
    else:
        absent |= {name: "package not installed" for name in RIVALS}
    shares = [0.03, 0.08, 0.4, 0.2, 0.17, 0.12] if rung.number == 1 else [0.03, 0.08, 0.4, 0.2, 0.29]
    stages = STAGES if rung.number == 1 else (*STAGES[:4], "state")
    return {
        "case": case,
        "regime": regime,
        "form": form,
        "shape": {},
        "floor_ms": floor,
        "clock": "graph",
        "samples_ms": samples,
        "eager_ms": {n: [x + 0.05 for x in s] for n, s in samples.items()},
        "clocks": clocks,
        "launches": {"rung": ["k"]},
        "absent": absent,
        "telemetry": {"sm_mhz": [1830, 1980], "mem_mhz": 3201, "temp_c": 54, "power_w": 512, "throttle": []},
        "stages_ms": {s: floor * own * share for s, share in zip(stages, shares, strict=True)}
        if form == "pre" or case == "h96"
        else {},
    }


def _check(rng: random.Random, rung, plan: Plan, device: str, arch: str) -> dict:
    rec = _base("check", rung, device, arch, 40)
    rec["rows"] = []
    for prop in (
        "oracle",
        "poisoned outputs",
        "first call survives",
        "second stream",
        "graph capture",
        "30 reruns equal",
        "memory flat",
        "prefix causality",
        "state joins halves",
        "kernels launched",
    ):
        outcome, reason = "passed", ""
        if device.startswith("CPU") and prop in ("second stream", "graph capture", "memory flat"):
            outcome, reason = "not run", "needs a GPU"
        if rung.number in plan.failing and prop == "prefix causality":
            outcome, reason = "failed", "row 63 of o changes when token 64 changes (max difference 0.031)"
        rec["rows"].append(
            {
                "rung": rung.number,
                "arch": arch,
                "property": prop,
                "outcome": outcome,
                "reason": reason,
                "case": "h96",
                "regime": "slow",
                "form": "prod",
                "seed": 7,
            }
        )
    return rec
