"""One-instruction PTX programs for sm_90a: what the manual says about an instruction, put to hardware and emulator alike.

Each module makes its programs from a small table. `everything()` gives them all by name; see program.py for what one is.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib

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
