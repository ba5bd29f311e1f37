"""Counters: classes, bank conflicts against hand counts, flops and bytes of the state kernels against their formulas."""

import numpy as np
import pytest

import emulator
from _common.cute import Unit  # noqa: F401  (the state kernels need the DSL)
from emulator import ptx
from emulator.counters import CLASSES, Counters, classify, flops_per_warp, table, wavefronts
from emulator.cute_host import EmulatedTarget
from ptx_programs import HEAD
from test_cute import operands, run_state

LANES = np.arange(32)


@pytest.mark.parametrize(
    "address, nbytes, steps, least",
    [
        (4 * LANES, 4, 1, 1),
        (0 * LANES, 4, 1, 1),  # one word for all: broadcast
        (8 * LANES, 4, 2, 1),  # every second bank: two words each
        (128 * LANES, 4, 32, 1),  # a column of a 128-byte row: one bank
        (2 * LANES, 2, 1, 1),  # two halves of a word
        (16 * LANES, 16, 4, 4),  # a quarter of the warp at a time
        (128 * LANES, 16, 32, 4),  # rows of a tile without swizzle: 8 in one group of banks
        (128 * LANES + 16 * (LANES % 8), 16, 4, 4),  # the 128-byte swizzle
        (8 * LANES, 8, 2, 2),
    ],
)
def test_wavefronts(address, nbytes, steps, least):
    assert wavefronts(LANES, address, nbytes) == (steps, least)
    two = np.arange(64)
    assert wavefronts(two, np.concatenate([address, address]), nbytes) == (2 * steps, 2 * least)


def test_classes():
    body = {
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16": "tensor",
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32": "tensor", "tcgen05.mma.cta_group::1.kind::f16": "tensor",
        "tcgen05.ld.sync.aligned.32x32b.x8.b32": "tensor memory", "tcgen05.wait::ld.sync.aligned": "sync",
        "cp.async.bulk.tensor.4d.shared::cta.global.tile": "bulk copy", "cp.async.bulk.commit_group": "sync",
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16": "shared", "st.shared.v4.b32": "shared", "ld.global.v4.b32": "global",
        "ld.param.u64": "integer", "bra.uni": "control", "fma.rn.f32": "float", "cvt.rn.bf16x2.f32": "float",
        "add.s32": "integer", "bar.sync": "sync", "mbarrier.try_wait.parity.shared::cta.b64": "sync",
        "fence.proxy.async.shared::cta": "sync",
    }  # fmt: skip
    for opcode, kind in body.items():
        ins = ptx.decode(f"{HEAD.format(arch='sm_100a')}.visible .entry k()\n{{\n{opcode};\n}}\n").kernels["k"].code[0]
        assert ins.opcode == opcode and classify(ins) == kind in CLASSES, opcode
        flops = {"wgmma": 2 * 16 * 128 * 16, "mma": 2 * 16 * 8 * 16}.get(opcode.split(".")[0], 0)
        assert flops_per_warp(ins) == flops, opcode


@pytest.mark.parametrize("seed", [None, 1])
def test_conflicts_of_a_column_store(seed):
    text = HEAD.format(arch="sm_90a") + """
.visible .entry k()
{
.shared .align 16 .b8 s[8192];
.reg .b32 %t<4>;
mov.u32 %t0, %tid.x;
and.b32 %t1, %t0, 31;
shl.b32 %t1, %t1, 7;
mov.u32 %t2, s;
add.u32 %t1, %t1, %t2;
st.shared.u32 [%t1], %t0;
st.shared.u32 [%t2], %t0;
ret;
}
"""
    counters = Counters()
    emulator.run(text, "k", 3, 64, 0, [], watch=counters, seed=seed)
    (row,) = counters.launches[0].rows()
    assert row["role"] == "warps 0-1" and row["steps"] == 3 * 2 * 33 and row["conflicts"] == 3 * 2 * 31
    assert row["classes"]["shared"] == 3 * 2 * 2 and row["classes"]["control"] == 3 * 2
    lines = table(counters.launches[0])
    assert "per CTA (an estimate of work, not a time)" in lines[0]
    assert lines[1].split() == ["role", "shared", "integer", "control", "shared", "steps", "conflicts"]
    assert lines[2].split() == ["warps", "0-1", "4", "10", "2", "66", "62"]


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_work_of_the_state_kernel(arch):
    """Four products a chunk and head: w S, qg S, kg^T v', Aqk v'; o leaves by bulk stores or ordinary ones."""
    T, K, V, C = 192, 64, 64, 64
    counters = Counters()
    run_state(EmulatedTarget(arch, watch=counters), operands(1, T, 1, K, V))
    (launch,) = counters.launches
    rows = launch.rows()
    assert sum(r["flops"] for r in rows) == T // C * 2 * (3 * C * K * V + C * C * V)
    done = sum(sum(r["classes"].values()) for r in rows)
    assert done == launch.instructions.sum() > 1000
    loaded = sum(r["loaded"] for r in rows)
    if loaded:  # by bulk copies: w, qg, kg, u, Aqk in bf16, and the last row of g2 or all of it in fp32
        assert loaded >= T // C * 2 * (3 * C * K + C * V + C * C)
