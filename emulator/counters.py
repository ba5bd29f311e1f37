"""A watcher that counts work: instructions by class, tensor-core flops, bytes of bulk copies and bank conflicts of shared
memory, per kernel and role. Counts are work, not time."""

from __future__ import annotations

import re

import numpy as np

from .memory import SHARED_WINDOW
from .roles import roles
from .watch import Watch

LABEL = "an estimate of work, not a time"
CLASSES = ("tensor", "bulk copy", "shared", "global", "tensor memory", "sync", "float", "integer", "control")
BANKS, BANK_BYTES = 32, 4
_SYNC = ("bar", "barrier", "mbarrier", "fence", "membar", "setmaxnreg", "elect", "griddepcontrol")
_FLOAT = ("ex2", "lg2", "rcp", "rsqrt", "sqrt", "tanh", "sin", "cos", "fma")


def classify(ins):
    """One of CLASSES."""
    head, rest = ins.parts[0], ins.parts[1:]
    if head == "mma" or ins.opcode.startswith(("wgmma.mma_async", "tcgen05.mma")):
        return "tensor"
    if ins.opcode.startswith(("tcgen05.ld", "tcgen05.st", "tcgen05.cp", "tcgen05.alloc", "tcgen05.dealloc")):
        return "tensor memory"
    if head in (*_SYNC, "wgmma", "tcgen05") or (head == "cp" and {"commit_group", "wait_group", "wait_all"} & set(rest)):
        return "sync"
    if head == "cp":
        return "bulk copy" if "bulk" in rest else "global"
    if head in ("ldmatrix", "stmatrix") or any(p.startswith("shared") for p in rest) and head in ("ld", "st", "atom", "red"):
        return "shared"
    if head in ("ld", "st", "atom", "red", "prefetch") and "param" not in rest:
        return "global"
    if head in ("bra", "ret", "exit", "brx", "call", "trap"):
        return "control"
    if head in _FLOAT or {"f32", "f16", "bf16", "f16x2", "bf16x2", "f32x2", "f64"} & set(rest):
        return "float"
    return "integer"


def flops_per_warp(ins):
    """Tensor-core flops of one warp instruction: mma.sync, or a warp's 16 rows of a wgmma. tcgen05 says at issue."""
    shape = re.search(r"\.m(\d+)n(\d+)k(\d+)", ins.opcode)
    if shape is None:
        return 0
    m, n, k = map(int, shape.groups())
    return 2 * (16 if ins.parts[0] == "wgmma" else m) * n * k


def wavefronts(lanes, address, nbytes):
    """(steps that shared memory needs for one access of each warp, steps without conflicts).

    32 banks of 4 bytes; a step serves up to 128 bytes: all lanes of a warp for 4 bytes or less, 16 for 8, 8 for 16.
    Lanes that want the same word share it; different words of one bank need a step each.
    """
    per = max(1, nbytes // BANK_BYTES)
    phase = (lanes >> 5) * per + (lanes & 31) * per // BANKS
    words = (address // BANK_BYTES)[:, None] + np.arange(per)
    keys = np.unique((phase[:, None] << 32 | words).ravel())
    banks, count = np.unique(keys >> 32 << 32 | keys % BANKS, return_counts=True)
    group = banks >> 32
    first = np.nonzero(np.concatenate(([True], group[1:] != group[:-1])))[0]
    return int(np.maximum.reduceat(count, first).sum()), len(first)


class Launch:
    """What one launch did. instructions [instruction, warp of the CTA], summed over CTAs; per warp of the CTA: flops,
    bytes loaded and stored by bulk copies, shared-memory steps and the steps beyond the least."""

    def __init__(self, machine):
        n = machine.warps_per_cta
        self.kernel, self.code, self.grid, self.ctas = machine.kernel.name, machine.kernel.code, machine.grid, machine.ctas
        self.instructions = np.zeros((len(machine.code), n), np.int64)
        self.flops, self.loaded, self.stored = np.zeros(n, np.int64), np.zeros(n, np.int64), np.zeros(n, np.int64)
        self.steps, self.conflicts = np.zeros(n, np.int64), np.zeros(n, np.int64)

    def rows(self):
        """One dict per role: role, its instructions by class, flops, loaded, stored, steps, conflicts."""
        kinds = np.array([CLASSES.index(classify(i)) for i in self.code] + [CLASSES.index("control")])
        fixed = np.array([flops_per_warp(i) for i in self.code] + [0])
        out = []
        for r in roles(self.code, self.instructions):
            n = self.instructions[:, r.warps].sum(1)
            classes = np.bincount(kinds, n, len(CLASSES)).astype(int).tolist()
            out.append({
                "role": str(r), "classes": dict(zip(CLASSES, classes)),
                "flops": int(fixed @ n) + int(self.flops[r.warps].sum()), "loaded": int(self.loaded[r.warps].sum()),
                "stored": int(self.stored[r.warps].sum()), "steps": int(self.steps[r.warps].sum()),
                "conflicts": int(self.conflicts[r.warps].sum()),
            })  # fmt: skip
        return out


class Counters(Watch):
    """launches: a Launch per kernel run, in order."""

    counts_warps = True

    def __init__(self):
        self.launches = []

    def launch(self, machine):
        self.now = Launch(machine)
        self.launches.append(self.now)

    def batch_end(self, machine):
        counts = machine.by_warp.reshape(len(machine.code), machine.batch, machine.warps_per_cta)
        self.now.instructions += counts.sum(1)

    def access(self, machine, f, ins, kind, space, address, nbytes):
        if space != "shared" or ins.parts[0] == "tcgen05":
            return
        at = (address & np.uint64(SHARED_WINDOW - 1)).astype(np.int64)
        for w in f.warps.tolist():
            mine = f.lanes >> 5 == w if len(f.warps) > 1 else slice(None)
            steps, least = wavefronts(f.lanes[mine], at[mine], nbytes)
            local = w % machine.warps_per_cta
            self.now.steps[local] += steps
            self.now.conflicts[local] += steps - least

    def async_issue(self, machine, f, ins, op):
        local = int(op.warps[0]) % machine.warps_per_cta
        if hasattr(op, "pieces"):
            (self.now.stored if op.mbar is None else self.now.loaded)[local] += op.pieces[5]
        elif getattr(op, "shape", None):
            m, n, k = op.shape
            self.now.flops[local] += 2 * m * n * k


def table(launch, parts=None, unit="CTA"):
    """Lines of text for one launch: its counts divided by `parts` (the number of CTAs, unless given)."""
    share = parts or launch.ctas
    per = lambda n: f"{n / share:,.0f}" if n % share == 0 or n >= 10 * share else f"{n / share:,.1f}"  # noqa: E731
    lines = [f"{launch.kernel}, grid {'x'.join(map(str, launch.grid))}, per {unit} ({LABEL}):"]
    rows = [["role", *CLASSES, "tensor flops", "bulk loads B", "bulk stores B", "shared steps", "conflicts"]]
    for r in launch.rows():
        numbers = [*r["classes"].values(), r["flops"], r["loaded"], r["stored"], r["steps"], r["conflicts"]]
        rows.append([r["role"], *(per(n) if n else "-" for n in numbers)])
    used = [i for i in range(len(rows[0])) if i == 0 or any(row[i] != "-" for row in rows[1:])]
    width = {i: max(len(row[i]) for row in rows) for i in used}
    for row in rows:
        lines.append("  " + "  ".join(row[i].ljust(width[i]) if i == 0 else row[i].rjust(width[i]) for i in used).rstrip())
    return lines
