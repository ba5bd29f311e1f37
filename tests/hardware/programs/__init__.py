"""One-instruction PTX programs for sm_90a: what the manual says about an instruction, put to hardware and emulator alike.

Each module makes its programs from a small table. `everything()` gives them all by name; see program.py for what one is.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import re
from collections.abc import Iterable

from .program import Program

MODULES = (
    "conversions",
    "functions",
    "floats",
    "integers",
    "warps",
    "matrices",
    "copies",
    "tensor_copies",
    "barriers",
    "warpgroups",
)


@functools.cache
def everything() -> dict[str, Program]:
    """Every program by name, in order; a program's group is its module."""
    modules = {name: importlib.import_module(f"{__name__}.{name}").PROGRAMS for name in MODULES}
    programs = [dataclasses.replace(p, group=name) for name, made in modules.items() for p in made]
    by_name = {p.name: p for p in programs}
    if len(by_name) != len(programs):
        raise ValueError("two programs of one name")
    return by_name


def opcodes(text: str) -> set[str]:
    """The opcodes of a PTX text, with all their modifiers."""
    found = set()
    for line in text.split("\n"):
        for statement in line.split("//")[0].split(";"):
            statement = re.sub(r"^[\s{}]*(\w+:\s*)*[\s{}]*(@!?%?\w+\s+)?", "", statement)
            if (m := re.match(r"([a-z][\w.:]*)\s", statement + " ")) and "." in m.group(1):
                found.add(m.group(1))
    return found


INTEGER = r"(add|sub|neg|not|and|or|xor|shl|shr|min|max|mul\.lo|mad\.lo|selp|setp\.\w+)\.([bsu]\d+|pred)$"
PLAIN = re.compile(rf"(mov|ld|st|cvta|bra|ret)\.|{INTEGER}|selp\.f32$")
"""Moves, jumps, and integer and bit arithmetic in types beside those that a program has."""


def uncovered(texts: Iterable[str]) -> list[str]:
    """Opcodes of these texts that no program has, plain ones left out."""
    have = set().union(*(opcodes(p.text) for p in everything().values()))
    used = set().union(*map(opcodes, texts))
    return sorted(op for op in used - have if not PLAIN.match(op))
