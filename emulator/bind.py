"""From decoded instructions to Python callables: the handler registry, modifiers, and typed views of operands.

A handler is called once per instruction and launch. It checks every modifier, takes typed arrays for the operands
and returns a function of a Fragment (the lanes that execute the instruction together). That function returns None to
go on to the next instruction, an int to jump, or an outcome of engine.py (Wait, PARK, EXIT).
"""

from __future__ import annotations

import functools
import importlib

import numpy as np

from . import ptx
from .errors import UnsupportedInstruction
from .memory import LOCAL_WINDOW, PARAM_WINDOW, SHARED_WINDOW

DTYPES = {
    "pred": np.bool_,
    "b8": np.uint8,
    "u8": np.uint8,
    "s8": np.int8,
    "b16": np.uint16,
    "u16": np.uint16,
    "s16": np.int16,
    "f16": np.float16,
    "bf16": np.uint16,
    "b32": np.uint32,
    "u32": np.uint32,
    "s32": np.int32,
    "f32": np.float32,
    "tf32": np.uint32,
    "f16x2": np.uint32,
    "bf16x2": np.uint32,
    "b64": np.uint64,
    "u64": np.uint64,
    "s64": np.int64,
    "f64": np.float64,
    "f32x2": np.uint64,
}
BYTES = dict(ptx.TYPE_BYTES, pred=1)
_HANDLERS = {}


def handler(*opcodes):
    """Register a handler for opcodes (dotted prefixes; the longest that matches an instruction wins)."""

    def register(fn):
        for name in opcodes:
            if name in _HANDLERS:
                raise ValueError(f"two handlers for {name}")
            _HANDLERS[name] = fn
        return fn

    return register


def handlers():
    """All registered handlers by opcode prefix."""
    _load()
    return dict(_HANDLERS)


@functools.cache
def _load():
    for name in (
        "integer",
        "floating",
        "convert",
        "data",
        "control",
        "warp",
        "mma",
        "cpasync",
        "mbarrier",
        "tma",
        "wgmma",
        "tcgen05",
    ):
        try:
            importlib.import_module(f"emulator.ops.{name}")
        except ModuleNotFoundError as e:
            if e.name != f"emulator.ops.{name}":
                raise


def unsupported(ins, what):
    source = f", source {ins.source[0]}:{ins.source[1]}" if ins.source else ""
    return UnsupportedInstruction(f"PTX line {ins.line}{source}: `{ins.text}`: {what}")


class Mods:
    """Modifiers of one instruction; each must be taken by the handler, `done` refuses what is left."""

    def __init__(self, ins, parts):
        self.ins, self.left = ins, list(parts)

    def flag(self, *names):
        """Take a modifier if present."""
        for n in names:
            if n in self.left:
                self.left.remove(n)
                return True
        return False

    def one(self, names, default=None):
        """Take the first modifier that is in `names`."""
        for i, n in enumerate(self.left):
            if n in names:
                return self.left.pop(i)
        return default

    def need(self, names, what):
        got = self.one(names)
        if got is None:
            raise unsupported(self.ins, f"{what}: needs one of {', '.join(names)}")
        return got

    def type(self):
        """Take the last modifier as a type."""
        if not self.left or self.left[-1] not in BYTES:
            raise unsupported(self.ins, f"no handler for type {self.left[-1] if self.left else '(none)'}")
        return self.left.pop()

    def done(self):
        if self.left:
            raise unsupported(self.ins, f"the handler of {self.ins.parts[0]} does not model .{' .'.join(self.left)}")


def bind(machine, ins):
    """The callable that executes `ins` on a fragment. Raises UnsupportedInstruction."""
    _load()
    parts = ins.parts
    for n in range(len(parts), 0, -1):
        make = _HANDLERS.get(".".join(parts[:n]))
        if make:
            run = make(machine, ins, Mods(ins, parts[n:]))
            break
    else:
        raise unsupported(
            ins, f"no handler for opcode {parts[0]}; add one under emulator/ops (README, 'Adding an instruction')"
        )
    run = machine.inflight.guard(machine, ins, run)
    return run if ins.predicate is None else _predicated(machine, ins, run)


def _predicated(machine, ins, run):
    p = machine.read(ins, ins.predicate, "pred")
    negated = ins.negated

    def guarded(f):
        mask = p[f.sel]
        if negated:
            mask = ~mask
        if mask.all():
            return run(f)
        if not mask.any():
            return None
        part = f.where(mask)
        r = run(part)
        return None if r is None else (part, r, f.where(~mask))

    return guarded


class Operands:
    """Typed arrays over all lanes of a batch for registers, immediates, special registers and symbols (mixin of
    Machine)."""

    def register(self, index):
        a = self.regs[index]
        if a is None:
            kind = self.kernel.registers[index][1]
            if kind not in DTYPES:
                raise UnsupportedInstruction(f"registers of type .{kind} are not modelled")
            size = BYTES[kind]
            # undefined registers hold ones, NaN in every float format; predicates false
            a = self.regs[index] = (
                np.zeros(self.lanes, np.bool_)
                if kind == "pred"
                else np.full(self.lanes, (1 << 8 * size) - 1, f"u{size}")
            )
        return a

    def read(self, ins, op, kind, wide=False):
        """Array [lanes] of `op` as `kind`. wide: a larger register may give its low part (ld, st, cvt, mov)."""
        dtype = np.dtype(DTYPES[kind])
        if isinstance(op, ptx.Reg):
            a = self.register(op.index)
            if a.dtype == dtype:
                return a
            if a.dtype == np.bool_ or dtype == np.bool_:
                raise unsupported(ins, f"{op.name} is .{op.type}, the instruction wants .{kind}")
            if a.itemsize == dtype.itemsize:
                return a.view(dtype)
            if wide and a.itemsize > dtype.itemsize:
                return a.view(dtype)[:: a.itemsize // dtype.itemsize]
            raise unsupported(ins, f"{op.name} is .{op.type}, the instruction wants .{kind}")
        if isinstance(op, ptx.Not):
            raise unsupported(ins, "negated predicate operands are not modelled here")
        if not isinstance(op, ptx.Special):
            return np.broadcast_to(self.constant(ins, op, kind, dtype), (self.lanes,))
        if dtype.itemsize != 4:
            raise unsupported(ins, f"{op.name} is .u32, the instruction wants .{kind}")
        return self.special(ins, op.name).view(dtype)  # some change from batch to batch

    def constant(self, ins, op, kind, dtype):
        """Value of an immediate or the address of a symbol, as a scalar of dtype."""
        if isinstance(op, ptx.Sym):
            value = self.address_of(ins, op.name)
        elif not isinstance(op, ptx.Imm):
            raise unsupported(ins, f"operand {op} cannot be read as .{kind}")
        elif op.kind == "int":
            if dtype.kind == "f":
                return dtype.type(op.value)
            value = op.value
        else:
            value = (
                np.uint32(op.value).view(np.float32)
                if op.kind == "f32"
                else np.uint64(op.value).view(np.float64)
                if op.kind == "f64"
                else np.float64(op.value)
            )
            if dtype.kind == "f":
                return dtype.type(value)
            value = int(value.view(f"u{value.itemsize}"))
            if dtype.itemsize < (4 if op.kind == "f32" else 8):
                raise unsupported(ins, f"floating-point immediate for a .{kind} operand")
        if dtype == np.bool_:
            return np.bool_(value != 0)
        bits = 8 * dtype.itemsize
        return np.array(value % (1 << bits), f"u{dtype.itemsize}").view(dtype)[()]

    def write(self, ins, op, kind, wide=False):
        """Writable array [lanes] for destination `op`. wide: a larger register is zero- or sign-extended by kind."""
        if isinstance(op, ptx.Sink):
            return np.zeros(self.lanes, DTYPES[kind])
        if not isinstance(op, ptx.Reg):
            raise unsupported(ins, f"destination {op} is not a register")
        a, dtype = self.register(op.index), np.dtype(DTYPES[kind])
        if a.dtype == dtype:
            return a
        if a.dtype != np.bool_ and dtype != np.bool_:
            if a.itemsize == dtype.itemsize:
                return a.view(dtype)
            if wide and a.itemsize > dtype.itemsize and dtype.kind in "iu":
                return a.view(f"{dtype.kind}{a.itemsize}")
        raise unsupported(ins, f"{op.name} is .{op.type}, the instruction writes .{kind}")

    def pair(self, ins, op, write=False):
        """View [lanes, 2] of a 64-bit register as two float32 (packed f32x2)."""
        a = self.write(ins, op, "b64") if write else np.ascontiguousarray(self.read(ins, op, "b64"))
        return a.view(np.float32).reshape(self.lanes, 2)

    def address_of(self, ins, name):
        v = self.kernel.variables.get(name) or self.module.variables.get(name)
        if v is not None and v.space == "shared":
            return self.shared_offsets[name]
        if v is not None and v.space == "local":
            return LOCAL_WINDOW + v.offset
        if v is not None and v.space in ("global", "const"):
            return self.module_address(v)
        for p in self.kernel.params:
            if p.name == name:
                return PARAM_WINDOW + p.offset
        raise unsupported(ins, f"symbol {name} is not declared in this module")

    def address(self, ins, op, space):
        """Function fragment -> uint64 addresses of an Addr operand; shared offsets stay offsets, params are
        PARAM_WINDOW."""
        if not isinstance(op, ptx.Addr):
            raise unsupported(ins, f"operand {op} is not an address")
        offset = op.offset
        if isinstance(op.base, ptx.Reg):
            size = BYTES[op.base.type]
            if size not in (4, 8):
                raise unsupported(ins, f"address register {op.base.name} is .{op.base.type}")
            base = self.read(ins, op.base, f"u{8 * size}")
            if size == 4:
                delta = np.uint32(offset % (1 << 32))
                return lambda f: (base[f.sel] + delta).astype(np.uint64)
            delta = np.uint64(offset % (1 << 64))
            return (lambda f: base[f.sel] + delta) if offset else (lambda f: base[f.sel])
        value = self.address_of(ins, op.base.name) if isinstance(op.base, ptx.Sym) else op.base.value
        value = np.uint64(value + offset)
        return lambda f: np.full(f.n, value, np.uint64)

    def split(self, address):
        """Space of generic addresses (all lanes alike): (space, offsets)."""
        top = int(address[0]) >> 56
        if top == 0:
            return "global", address
        if (address >> np.uint64(56) != top).any():
            return None, address
        space = {1: "shared", 2: "local", 4: "param"}.get(top)
        return (space, address & np.uint64(SHARED_WINDOW - 1)) if space else ("global", address)
