"""Small PTX programs around one instruction, for the unit tests."""

import numpy as np

import emulator

SUFFIX = {1: "b8", 2: "b16", 4: "b32", 8: "b64"}
HEAD = ".version 8.6\n.target {arch}\n.address_size 64\n"


def lanes(body, inputs, outputs, arch="sm_100a", extra="", seed=None, block=None):
    """Run `body` once per lane. Inputs x0, x1, ... and outputs y0, y1, ... are registers as wide as the arrays'
    elements.

    inputs: list of arrays of equal length n; outputs: list of dtypes. Returns arrays of length n.
    """
    n = len(inputs[0]) if inputs else block
    arrays = [np.ascontiguousarray(x) for x in inputs]
    results = [np.zeros(n, d) for d in outputs]
    params = ", ".join(f".param .u64 p{i}" for i in range(len(arrays) + len(results)))
    code = ["mov.u32 %t, %tid.x;"]
    regs = [
        ".reg .b32 %t; .reg .b64 %a; .reg .b64 %o; .reg .pred %p<8>; .reg .b32 %r<16>;",
        ".reg .b64 %rd<16>; .reg .b16 %h<16>;",
    ]
    for i, x in enumerate([*arrays, *results]):
        name = f"x{i}" if i < len(arrays) else f"y{i - len(arrays)}"
        b = SUFFIX[x.itemsize]
        regs.append(f".reg .{'b16' if b == 'b8' else b} {name};")
        if i < len(arrays):
            code += [
                f"ld.param.u64 %a, [p{i}];",
                f"mad.wide.u32 %a, %t, {x.itemsize}, %a;",
                f"ld.global.{b} {name}, [%a];",
            ]
    code.append(body)
    for j, y in enumerate(results):
        i = len(arrays) + j
        code += [
            f"ld.param.u64 %o, [p{i}];",
            f"mad.wide.u32 %o, %t, {y.itemsize}, %o;",
            f"st.global.{SUFFIX[y.itemsize]} [%o], y{j};",
        ]
    text = (
        HEAD.format(arch=arch)
        + f".visible .entry k({params})\n{{\n"
        + "\n".join(regs)
        + "\n"
        + extra
        + "\n"
        + "\n".join(code)
        + "\nret;\n}\n"
    )
    emulator.run(text, "k", 1, block or n, 0, arrays + results, arch=arch, seed=seed)
    return results[0] if len(results) == 1 else results


def bits(x):
    """float32 array to its bit pattern, and so on."""
    return np.ascontiguousarray(x).view(f"u{x.itemsize}")
