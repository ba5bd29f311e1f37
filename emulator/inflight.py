"""Registers that asynchronous instructions own: results of tcgen05.ld and wgmma before their wait, operands of wgmma.

PTX ISA: tcgen05.wait::ld must come before a register loaded by tcgen05.ld is used, wgmma.wait_group before an
accumulator (or an A register) of wgmma.mma_async is touched, and wgmma.fence after such a register was written, or an
accumulator read, and before the next wgmma with it. Compilers move register copies (mov) across these instructions,
which the assembler sees through, so a copy of a register in flight is in flight too, and a copy into or out of a wgmma
operand is no access. Everything else that touches one raises ProtocolError.
"""

from __future__ import annotations

import numpy as np

from . import ptx
from .errors import ProtocolError

_ARITHMETIC = frozenset(
    "add sub mul mad fma div rem min max abs neg rcp sqrt rsqrt ex2 lg2 sin cos tanh copysign cvt selp slct setp set "
    "and or xor not cnot lop3 shl shr shf bfe bfi bfind bmsk brev popc clz prmt".split()
)


def registers(op):
    """Indices of all registers in an operand."""
    if isinstance(op, ptx.Reg):
        return [op.index]
    if isinstance(op, ptx.Vec):
        return [i for x in op.items for i in registers(x)]
    if isinstance(op, ptx.Addr):
        return registers(op.base) + [i for x in op.coords for i in registers(x)]
    if isinstance(op, ptx.Pair):
        return registers(op.first) + registers(op.second)
    return registers(op.item) if isinstance(op, ptx.Not) else []


class InFlight:
    """Per register and warp: 0, or 1 + the group whose completion frees it. `busy`: results to come; `lent`: A
    operands of wgmma, which may be read but not written; `dirty`: wgmma operands written, and accumulators read,
    since the warp's last wgmma.fence."""

    def __init__(self, kernel):
        self.names = kernel.registers
        self.tracked, self.operands, self.accumulators = set(), set(), set()
        self.makers = {}  # register -> instructions whose result it holds
        moves = []
        # no side effect orders register arithmetic against tcgen05.wait::ld, so compilers move it; wgmma's they leave
        self.follow_all = any(i.opcode.startswith("tcgen05.ld") for i in kernel.code)
        for ins in kernel.code:
            if ins.opcode.startswith(("tcgen05.ld", "wgmma.mma_async")):
                for i in registers(ins.operands[0]):
                    self.makers.setdefault(i, []).append(ins)
            if ins.opcode.startswith("tcgen05.ld"):
                self.tracked.update(registers(ins.operands[0]))
            elif ins.opcode.startswith("wgmma.mma_async"):
                regs = registers(ins.operands[0]) + registers(ins.operands[1]) * isinstance(ins.operands[1], ptx.Vec)
                self.accumulators.update(registers(ins.operands[0]))
                self.tracked.update(regs)
                self.operands.update(regs)
            elif self.follows(ins):
                moves.append((registers(ins.operands[0]), [i for op in ins.operands[1:] for i in registers(op)]))
        again = bool(self.tracked)
        while again:
            again = False
            for dst, src in moves:
                first = next((s for s in src if s in self.tracked), None)
                if first is not None and not all(d in self.tracked for d in dst):
                    self.tracked.update(dst)
                    for d in dst:
                        self.makers.setdefault(d, self.makers.get(first, []))
                    again = True
        self.busy, self.lent, self.dirty = {}, {}, {}

    def follows(self, ins):
        """Does this instruction pass the state of its sources on to its destination, instead of needing them now?"""
        name = ins.opcode.split(".")[0]
        return name == "mov" or (self.follow_all and name in _ARITHMETIC)

    def reset(self, warps):
        self.busy.clear()
        self.lent.clear()
        self.dirty.clear()
        self.warps = warps

    def mark(self, index, warps, group=0, table=None):
        table = self.busy if table is None else table
        a = table.get(index)
        if a is None:
            a = table[index] = np.zeros(self.warps, np.int64)
        a[warps] = group + 1

    def release(self, warps, limit):
        """Free registers whose group is older than limit (per warp of the batch)."""
        for table in (self.busy, self.lent):
            for i in list(table):
                a = table[i]
                a[warps] = np.where(a[warps] <= limit, 0, a[warps])
                if not a.any():
                    del table[i]

    def touched(self, indices, warps, table=None):
        """The first of these registers that is busy (or in `table`) for one of the warps, or None."""
        table = self.busy if table is None else table
        for i in indices:
            a = table.get(i)
            if a is not None and a[warps].any():
                return i
        return None

    def name(self, index):
        return self.names[index][0]

    def _maker(self, index, use):
        """The asynchronous instruction whose result (or a copy of it) a register is: the last one before the use."""
        from .engine import source

        makers = self.makers.get(index, [])
        before = [ins for ins in makers if ins.line < use.line] or makers
        if not before:
            return "an asynchronous operation"
        return f"the {'.'.join(before[-1].parts[:2])} of PTX line {before[-1].line}{source(before[-1])},"

    def guard(self, m, ins, run):
        """Wrap the callable of an instruction that has tracked registers among its operands."""
        if not self.tracked:
            return run
        used = [i for op in ins.operands for i in registers(op) if i in self.tracked]
        if not used or ins.opcode.startswith(("wgmma.", "tcgen05.ld")):
            return run
        if self.follows(ins):
            return self._guard_move(m, ins, run)
        stores = ins.opcode.startswith(("st", "red", "tcgen05", "cp", "bra"))
        written = [] if stores else [i for i in registers(ins.operands[0]) if i in self.operands]
        accessed = [i for i in used if i in self.accumulators or i in written]

        def guarded(f):
            if self.busy:
                i = self.touched(used, f.warps)
                if i is not None and not m.strict_waits and self.follow_all:
                    m.early_uses.add(f.pc)
                    for i in used:
                        if self.touched([i], f.warps) is not None:
                            m.force(i, f)
                elif i is not None:
                    raise ProtocolError(
                        f"register {self.name(i)} belongs to {self._maker(i, ins)} that this warp has not waited for "
                        f"({'tcgen05.wait::ld' if self.follow_all else 'wgmma.wait_group'} is missing)"
                    )
            self.check_lent(written, f)
            for i in accessed:
                self.dirty.setdefault(i, np.zeros(self.warps, bool))[f.warps] = True
            return run(f)

        return guarded

    def _guard_move(self, m, ins, run):
        src = [i for op in ins.operands[1:] for i in registers(op) if i in self.tracked]
        dst = registers(ins.operands[0])

        def moved(f):
            self.check_lent(dst, f)
            if self.busy:
                i = self.touched(src, f.warps)
                if i is not None:
                    m.force(i, f)  # the copy needs a value: the operation happens now at the latest
                    r = run(f)
                    for s in src:
                        if s in self.busy:
                            for d in dst:
                                self.mark(d, f.warps, self.busy[s][f.warps].max() - 1)
                    return r
            return run(f)

        return moved

    def check_lent(self, written, f):
        i = self.touched(written, f.warps, self.lent) if self.lent else None
        if i is not None:
            raise ProtocolError(
                f"register {self.name(i)} is written while a wgmma that reads it has not been waited for "
                "(wgmma.wait_group is missing)"
            )

    def check_fence(self, indices, warps):
        """wgmma is about to use these registers: were they written since the warp's last wgmma.fence?"""
        for i in indices:
            a = self.dirty.get(i)
            if a is not None and a[warps].any():
                raise ProtocolError(
                    f"wgmma uses register {self.name(i)}, accessed since the last wgmma.fence of this warp"
                )

    def fence(self, warps):
        for i in list(self.dirty):
            self.dirty[i][warps] = False
            if not self.dirty[i].any():
                del self.dirty[i]
