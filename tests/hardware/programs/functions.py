"""Approximate functions, each within the error that the manual states for it (PTX ISA, "Floating-Point Instructions"), and the
correctly rounded ones beside them, bit for bit.

The emulator computes the approximate ones correctly rounded; hardware reads tables. So both are held to the manual's bound
against the exact value, and special values (zeros, infinities, NaN, what .ftz flushes) to the same bits.
"""

from __future__ import annotations

import numpy as np

from .program import Bitwise, Within, floats, generator, lanes

# instruction: exact function, documented error, exponents of the inputs, positive inputs only
TABLE = {
    "ex2.approx.f32": (np.exp2, {"ulps": 2}, (-24, 7), False),
    "ex2.approx.ftz.f32": (np.exp2, {"ulps": 2}, (-24, 7), False),
    "lg2.approx.f32": (np.log2, {"relative": 2.0**-22, "absolute": 2.0**-22}, (-126, 127), True),
    "lg2.approx.ftz.f32": (np.log2, {"relative": 2.0**-22, "absolute": 2.0**-22}, (-126, 127), True),
    "rcp.approx.ftz.f32": (lambda x: 1 / x, {"ulps": 1}, (-125, 125), False),
    "rsqrt.approx.ftz.f32": (lambda x: 1 / np.sqrt(x), {"relative": 2.0**-22.9}, (-126, 127), True),
    "sqrt.approx.ftz.f32": (np.sqrt, {"relative": 2.0**-23}, (-126, 127), True),
    "tanh.approx.f32": (np.tanh, {"relative": 2.0**-10.987}, (-12, 5), False),
}  # fmt: skip
EXACT = {"rcp.rn.f32": lambda x: 1 / x, "sqrt.rn.f32": np.sqrt}


def approximate(name: str):
    function, error, span, positive = TABLE[name]
    x = floats(name, 8192, *span)
    if positive:
        x[64:] = np.abs(x[64:])
    if name.startswith("lg2"):  # near one, where the result is small and the bound is absolute
        x[4096:] = generator(name + " near one").uniform(0.5, 2, 4096).astype(np.float32)
    compare = Within(function, ftz=".ftz" in name, **error)
    return lanes(name, f"{name} y, x;", {"x": x}, {"y": np.float32}, None, compare)


def correctly_rounded(name: str):
    """1/x and the root of a float32, computed in float64 and rounded once more, are correctly rounded: 53 >= 2 * 24 + 2 bits."""

    def manual(inputs):
        with np.errstate(all="ignore"):
            return {"y": EXACT[name](inputs["x"].astype(np.float64)).astype(np.float32)}

    x = floats(name, 2048, -126, 126)
    x[1024:] = np.abs(x[1024:])
    return lanes(name, f"{name} y, x;", {"x": x}, {"y": np.float32}, manual, Bitwise(nan=True))


def divide(name: str, compare):
    def manual(inputs):
        with np.errstate(all="ignore"):
            return {"y": (inputs["a"].astype(np.float64) / inputs["b"].astype(np.float64)).astype(np.float32)}

    given = {"a": floats(name + "a", 4096, -40, 40), "b": floats(name + "b", 4096, -40, 40)}
    given["b"][:64] = np.roll(given["b"][:64], 7)
    return lanes(name, f"{name} y, a, b;", given, {"y": np.float32}, manual if isinstance(compare, Bitwise) else None, compare)


PROGRAMS = [
    *map(approximate, TABLE), *map(correctly_rounded, EXACT),
    divide("div.full.f32", Within(np.divide, ulps=2, inputs=("a", "b"))), divide("div.rn.f32", Bitwise(nan=True)),
]  # fmt: skip
