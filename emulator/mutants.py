"""One-fault copies of a kernel's PTX: every synchronisation removed, one at a time, and a set of other slips.

A mutant changes the text of one line (a removed wait: the lines of its loop) and never their number, so that line
numbers in what is reported are those of the original. `enumerate_mutants` lists them; `Mutant.apply` gives the text.

| kind                | what is wrong |
|---------------------|------------------------------------------------------------|
| no fence            | fence.proxy.async, fence.mbarrier_init, wgmma.fence, tcgen05.fence removed |
| no wait             | mbarrier.try_wait with its loop, wgmma.wait_group, tcgen05.wait, cp.async.bulk.wait_group removed |
| no arrive           | mbarrier.arrive removed, with its expect_tx if it has one |
| no commit           | wgmma.commit_group, tcgen05.commit, cp.async.bulk.commit_group removed |
| no barrier          | bar.sync, bar.warp.sync removed |
| no init             | mbarrier.init removed |
| no dealloc          | tcgen05.dealloc removed |
| wrong phase         | the parity that a try_wait waits for flipped, or stuck at 0 |
| byte count          | expect_tx of 16 bytes more, 16 less |
| arrival count       | mbarrier.init with one arrival more, one less |
| one barrier for two | a barrier lives where its neighbour does: every use of it goes there |
| barrier in a tile   | a barrier lives in shared memory that a TMA load fills |
| descriptor          | first product of a group: start address, offsets or swizzle mode of a matrix descriptor |
| transposed          | .trans of ldmatrix or stmatrix dropped or added; an operand's major-ness in a product flipped |
| not zeroed          | first product of a group: accumulates where it should overwrite, or the other way |
| decay row           | the row `min(...)` of g2 that holds a chunk's decay, one early or one late |
| TMA swizzle         | a tensor map without its swizzle |
| Aqk not zeroed      | NaN above Aqk's diagonal, as an intra stage leaves that does not write there |

Not made: the leading-dimension offset of a swizzled K-major descriptor, which the hardware does not read (PTX ISA,
"Canonical Layouts").
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from .launch import decode
from .ptx import Imm, Instruction

REMOVED = (  # (kind, opcodes begin with); try_wait is removed with its loop
    ("no fence", ("fence.", "membar", "wgmma.fence", "tcgen05.fence")),
    ("no wait", ("wgmma.wait_group", "tcgen05.wait", "cp.async.bulk.wait_group", "cp.async.wait")),
    ("no arrive", ("mbarrier.arrive",)),
    ("no commit", ("wgmma.commit_group", "tcgen05.commit", "cp.async.bulk.commit_group", "cp.async.commit_group")),
    ("no barrier", ("bar.", "barrier.")),
    ("no init", ("mbarrier.init",)),
    ("no dealloc", ("tcgen05.dealloc",)),
)
DESCRIPTOR_BITS = {  # exclusive-or masks; both descriptor formats have these fields in these places
    "start address": 2,  # 32 bytes: the next slice of the contraction
    "leading-dimension offset": 1 << 16,
    "stride offset": 1 << 32,
    "swizzle mode none": 1 << 62,
    "swizzle mode 64B": 3 << 62,
}


@dataclass(frozen=True)
class Mutant:
    """name is unique within a kernel: its kind, what, and which in program order. line: PTX line, 0 where the fault is
    in the operands. edits: (line number, new text). tensor_map: index of the parameter whose swizzle is dropped.
    operand: the name of the input that is spoilt. barriers: the two shared addresses of an aliased pair."""

    name: str
    kind: str
    line: int = 0
    source: tuple[str, int] | None = None
    text: str = ""
    edits: tuple[tuple[int, str], ...] = ()
    tensor_map: int | None = None
    operand: str | None = None
    barriers: tuple[int, int] | None = None

    def apply(self, ptx: str) -> str:
        lines = ptx.split("\n")
        for number, text in self.edits:
            lines[number - 1] = text
        return "\n".join(lines)


@dataclass
class _Text:
    """A kernel's text, what is known of a clean run of it, and how many mutants of each name there are so far."""

    lines: list[str]
    code: list[Instruction]
    barriers: dict[int, set[int]]  # PTX line -> addresses of the mbarriers it works on
    tiles: list[int]  # shared addresses where bulk loads begin
    seen: dict[str, int] = field(default_factory=dict)

    def mutant(self, kind: str, what: str, ins: Instruction, *edits: tuple[int, str], **more) -> Mutant:
        name = f"{kind}: {what}"
        self.seen[name] = self.seen.get(name, -1) + 1
        return Mutant(f"{name} #{self.seen[name]}", kind, ins.line, ins.source, ins.text, edits, **more)

    def before(self, ins: Instruction, setup: str, old: str, new: str) -> tuple[int, str]:
        """`ins` with operand `old` replaced by `new`, which `setup` computes, in braces of its own."""
        predicate, statement = _split(self.lines[ins.line - 1])
        assert old in statement, (old, statement)
        head, _, tail = statement.rpartition(old)
        body = f"{predicate}{head}{new}{tail}"
        return ins.line, f"{{ {setup} {body} }}"

    def opcode(self, *begin: str) -> Iterator[Instruction]:
        return (i for i in self.code if i.opcode.startswith(begin))


def _split(line: str) -> tuple[str, str]:
    m = re.match(r"\s*(@!?%?\w+\s+)?(.*)$", line, re.S)
    return m[1] or "", m[2]


def enumerate_mutants(
    ptx: str, kernel: str, barriers: dict[int, set[int]], tiles: list[int],
    tensor_maps: dict[int, str] | None = None, operands: tuple[str, ...] = (),
) -> list[Mutant]:  # fmt: skip
    """Every mutant of `kernel`. barriers: which mbarriers (shared addresses) each PTX line works on, and tiles: where
    bulk loads write, as a clean run shows them. tensor_maps: parameter index -> swizzle. operands: inputs whose
    unused part should be zero."""
    text = _Text(ptx.split("\n"), decode(ptx).kernels[kernel].code, barriers, sorted(tiles))
    makers = (_removed, _waits_removed, _phases, _byte_counts, _arrival_counts, _aliases, _descriptors, _transposes,
              _not_zeroed, _decay_rows)  # fmt: skip
    found = [m for make in makers for m in make(text)]
    for index, swizzle in sorted((tensor_maps or {}).items()):
        if swizzle != "none":
            found.append(Mutant(f"TMA swizzle: parameter {index}", "TMA swizzle", tensor_map=index))
    found += [Mutant(f"{name} not zeroed", "Aqk not zeroed", operand=name) for name in operands]
    return found


def enumerate_removals(ptx: str, kernel: str) -> list[Mutant]:
    """The mutants of `kernel` in which one synchronisation is missing, in program order."""
    text = _Text(ptx.split("\n"), decode(ptx).kernels[kernel].code, {}, [])
    return sorted((m for make in (_removed, _waits_removed) for m in make(text)), key=lambda m: m.line)


def _removed(t: _Text) -> Iterator[Mutant]:
    for kind, begin in REMOVED:
        for ins in t.opcode(*begin):
            yield t.mutant(kind, _short(ins), ins, (ins.line, ""))


def _short(ins: Instruction) -> str:
    """The opcode without what all of its kind share."""
    drop = {"sync", "aligned", "shared", "b64", "cta_group::1", "mbarrier::arrive::one", "shared::cluster", "cluster",
            "b32", "shared::cta", "parity"}  # fmt: skip
    return ".".join(p for p in ins.parts if p not in drop)


def _waits_removed(t: _Text) -> Iterator[Mutant]:
    for ins in t.opcode("mbarrier.try_wait", "mbarrier.test_wait"):
        first, last = _block(t.lines, ins.line)
        yield t.mutant("no wait", _short(ins), ins, *((n, "") for n in range(first, last + 1)))


def _block(lines: list[str], number: int) -> tuple[int, int]:
    """First and last line of the braces around line `number`: a wait with its loop."""
    first = last = number
    while lines[first - 1].strip() != "{":
        first -= 1
    while lines[last - 1].strip() != "}":
        last += 1
    return first, last


def _phases(t: _Text) -> Iterator[Mutant]:
    for ins in t.opcode("mbarrier.try_wait.parity", "mbarrier.test_wait.parity"):
        operand = ins.operands[2]
        line = t.lines[ins.line - 1]
        if isinstance(operand, Imm):
            edit = ins.line, re.sub(rf"\], {operand.value}\b", f"], {1 - int(operand.value)}", line)
            yield t.mutant("wrong phase", "flipped", ins, edit)
            continue
        flip = f".reg .b32 MUT; xor.b32 MUT, {operand.name}, 1; "
        yield t.mutant("wrong phase", "flipped", ins, (ins.line, flip + line.replace(f"{operand.name},", "MUT,")))
        yield t.mutant("wrong phase", "stuck at 0", ins, (ins.line, line.replace(f"{operand.name},", "0,")))


def _byte_counts(t: _Text) -> Iterator[Mutant]:
    for ins in t.opcode("mbarrier.arrive.expect_tx", "mbarrier.expect_tx"):
        old = t.lines[ins.line - 1].rpartition(",")[2].strip(" ;")
        for change in (16, -16):
            setup = f".reg .b32 MUT; add.s32 MUT, {old}, {change};"
            yield t.mutant("byte count", f"{change:+d}", ins, t.before(ins, setup, old, "MUT"))


def _arrival_counts(t: _Text) -> Iterator[Mutant]:
    for ins in t.opcode("mbarrier.init"):
        old = t.lines[ins.line - 1].rpartition(",")[2].strip(" ;")
        for change in (1, -1):
            setup = f".reg .b32 MUT; add.s32 MUT, {old}, {change};"
            yield t.mutant("arrival count", f"{change:+d}", ins, t.before(ins, setup, old, "MUT"))


_BARRIER_USE = re.compile(r"\[(%r\d+)(?:\+(\d+))?\]")


def _aliases(t: _Text) -> Iterator[Mutant]:
    inits = [i for i in t.opcode("mbarrier.init") if t.barriers.get(i.line)]
    places = {ins.line: min(t.barriers[ins.line]) for ins in inits}
    for before, ins in zip(inits, inits[1:]):
        yield _moved(t, "one barrier for two", "its neighbour's", ins, places[ins.line], places[before.line])
    for ins in inits[:1]:
        yield _moved(t, "barrier in a tile", "first tile", ins, places[ins.line], t.tiles[0] + 8)


def _moved(t: _Text, kind: str, what: str, ins: Instruction, old: int, new: int) -> Mutant:
    """Every use of the barrier at shared address `old` goes to `new`."""
    edits = []
    for use in t.code:
        if old not in t.barriers.get(use.line, ()):
            continue
        operand = _BARRIER_USE.findall(t.lines[use.line - 1])[-1]  # of several addresses the barrier comes last
        register, offset = operand[0], operand[1] or "0"
        setup = (f".reg .b32 MUT; .reg .pred MUTP; add.s32 MUT, {register}, {offset}; "
                 f"setp.eq.b32 MUTP, MUT, {old}; @MUTP mov.b32 MUT, {new};")  # fmt: skip
        text = f"[{register}+{offset}]" if operand[1] else f"[{register}]"
        if "try_wait" in use.opcode:  # it stands in braces with its loop already
            edits.append((use.line, f"{setup} {t.lines[use.line - 1].replace(text, '[MUT]')}"))
        else:
            edits.append(t.before(use, setup, text, "[MUT]"))
    return t.mutant(kind, what, ins, *edits, barriers=(old, new))


def _groups(t: _Text) -> Iterator[Instruction]:
    """The first product of every group: of wgmma, after a fence or commit; of tcgen05, the one that overwrites."""
    fresh, zero = True, set()
    for ins in t.code:
        if ins.opcode.startswith(("wgmma.fence", "wgmma.commit")):
            fresh = True
        elif ins.opcode.startswith("wgmma.mma_async"):
            if fresh:
                yield ins
            fresh = False
        elif ins.opcode == "mov.pred":
            (zero.add if getattr(ins.operands[1], "value", 1) == 0 else zero.discard)(ins.operands[0].name)
        elif ins.opcode.startswith("tcgen05.mma") and ins.operands[-1].name in zero:
            yield ins


def _descriptors(t: _Text) -> Iterator[Mutant]:
    for ins in _groups(t):
        for operand in (o for o in ins.operands[1:3] if getattr(o, "type", "") == "b64"):
            mn_major = _mn_major(t, ins, operand is ins.operands[2])
            for what, mask in DESCRIPTOR_BITS.items():
                if what == "leading-dimension offset" and not mn_major:
                    continue
                setup = f".reg .b64 MUT; xor.b64 MUT, {operand.name}, {mask};"
                yield t.mutant("descriptor", what, ins, t.before(ins, setup, f"{operand.name},", "MUT,"))


def _mn_major(t: _Text, ins: Instruction, b: bool) -> bool:
    if ins.opcode.startswith("wgmma"):
        return ins.operands[-1].value == 1  # A is in registers
    return bool(_assigned(t, ins) >> (16 if b else 15) & 1)


def _assigned(t: _Text, ins: Instruction) -> int:
    """The instruction descriptor of a tcgen05.mma: the constant last moved to its register."""
    name = ins.operands[3].name
    moves = (i for i in t.code if i.opcode == "mov.b32" and getattr(i.operands[0], "name", "") == name)
    return [i.operands[1].value for i in moves if i.line < ins.line][-1]


def _transposes(t: _Text) -> Iterator[Mutant]:
    for ins in t.opcode("ldmatrix", "stmatrix"):
        line = t.lines[ins.line - 1]
        toggled = line.replace(".trans", "") if ".trans" in line else line.replace(".shared", ".trans.shared")
        yield t.mutant("transposed", ins.parts[0], ins, (ins.line, toggled))
    for ins in _groups(t):
        if ins.opcode.startswith("wgmma"):
            head, _, last = t.lines[ins.line - 1].rpartition(",")
            edit = ins.line, f"{head}, {1 - int(last.strip(' ;'))};"
            yield t.mutant("transposed", "operand B", ins, edit)
            continue
        for what, bit in (("operand A", 15), ("operand B", 16)):
            old = f"{ins.operands[3].name},"
            setup = f".reg .b32 MUT; xor.b32 MUT, {old} {1 << bit};"
            yield t.mutant("transposed", what, ins, t.before(ins, setup, old, "MUT,"))


def _not_zeroed(t: _Text) -> Iterator[Mutant]:
    for ins in _groups(t):
        p = ins.operands[-1] if ins.opcode.startswith("tcgen05") else ins.operands[3]
        old = f"{p.name};" if ins.opcode.startswith("tcgen05") else f"{p.name},"
        setup = f".reg .pred MUT; not.pred MUT, {p.name};"
        yield t.mutant("not zeroed", "accumulate", ins, t.before(ins, setup, old, "MUT" + old[-1]))


def _decay_rows(t: _Text) -> Iterator[Mutant]:
    """The only minimum these kernels take is that of a chunk's last row and T - 1."""
    for ins in t.opcode("min.s32", "min.u32"):
        for what, change in (("one early", -1), ("one late", 1)):
            name = ins.operands[0].name
            edit = ins.line, f"{t.lines[ins.line - 1]} add.s32 {name}, {name}, {change};"
            yield t.mutant("decay row", what, ins, edit)
