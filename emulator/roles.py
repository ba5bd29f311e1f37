"""Roles of a kernel's warps: neighbouring warps that execute the same instructions, named after the Python function that
most of what only they execute was written in."""

from __future__ import annotations

import ast
import functools
import linecache
import os
from dataclasses import dataclass

import numpy as np

ALIKE = 0.6  # two warps share a role if they have this share of their executed instructions in common


@dataclass(frozen=True)
class Role:
    """Warps first to last (numbers within the CTA); name: a function of the source, or ""."""

    first: int
    last: int
    name: str = ""

    def __str__(self):
        warps = f"warp {self.first}" if self.first == self.last else f"warps {self.first}-{self.last}"
        return f"{warps} {self.name}".strip()

    @property
    def warps(self):
        return slice(self.first, self.last + 1)


def roles(code, counts):
    """Roles from counts [instructions, warps of a CTA] of what each warp executed."""
    ran, first, found = counts > 0, 0, []
    for w in range(1, counts.shape[1] + 1):
        if w == counts.shape[1] or not _alike(ran[:, w - 1], ran[:, w]):
            found.append(Role(first, w - 1))
            first = w
    if len(found) == 1:
        return found
    mine = [_by_function(code, counts[:, r.warps].sum(1)) for r in found]
    named, taken = [], {}
    for r, functions in zip(found, mine):
        own = {f: n for f, n in functions.items() if n >= 0.9 * sum(other.get(f, 0) for other in mine)}
        name = max(own, key=own.get) if own else ""
        taken[name] = taken.get(name, 0) + 1
        named.append(Role(r.first, r.last, name))
    return named


def _alike(a, b):
    both = (a | b).sum()
    return not both or (a & b).sum() >= ALIKE * both


def _by_function(code, executed):
    """{function name: instructions executed that were written in it}."""
    out = {}
    for pc in np.nonzero(executed[: len(code)])[0].tolist():
        name = function_of(code[pc])
        if name:
            out[name] = out.get(name, 0) + int(executed[pc])
    return out


@functools.lru_cache(maxsize=64)
def _functions(path):
    """{line: innermost function} of a Python file, {} where it cannot be read."""
    try:
        with open(path, encoding="utf-8") as f:
            tree = ast.parse(f.read())
    except (OSError, SyntaxError, ValueError):
        return {}
    found = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
    lines = {}
    for n in sorted(found, key=lambda n: n.lineno):  # inner functions come later and win
        lines.update(dict.fromkeys(range(n.lineno, n.end_lineno + 1), n.name))
    return lines


def function_of(ins):
    """Name of the Python function that an instruction comes from, or ""."""
    return _functions(ins.source[0]).get(ins.source[1], "") if ins.source else ""


def source_text(ins):
    """"file:line: text of the line" of an instruction's source, as far as it is known."""
    if not ins.source:
        return ""
    text = linecache.getline(*ins.source).strip()
    return f"{os.path.basename(ins.source[0])}:{ins.source[1]}{': ' if text else ''}{text}"
