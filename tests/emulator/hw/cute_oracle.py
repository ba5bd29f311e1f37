"""Tables from CuTe itself, computed without a GPU: `python cute_oracle.py sm_90a|sm_100a OUT.npz` (CUTE_DSL_ARCH must
match).

Layouts are evaluated while a host function is traced; descriptors and instruction descriptors are read from the PTX of
kernels that only store or use them. Nothing here imports the emulator.
"""

import glob
import os
import re
import sys
import tempfile

DUMP = tempfile.mkdtemp()
os.environ.update(CUTE_DSL_KEEP_PTX="1", CUTE_DSL_DUMP_DIR=DUMP)

import cutlass  # noqa: E402
import cutlass.cute as cute  # noqa: E402
import numpy as np  # noqa: E402
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05, warpgroup  # noqa: E402
from cutlass.cute.nvgpu.tcgen05 import smem_descriptor_to_int  # noqa: E402
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream  # noqa: E402

TABLES: dict[str, np.ndarray] = {}
MAJORS = {"K": OperandMajorMode.K, "MN": OperandMajorMode.MN}
SWIZZLES = {"none": "INTER", "32B": "SW32", "64B": "SW64", "128B": "SW128"}
TYPES = {"bf16": cutlass.BFloat16, "tf32": cutlass.TFloat32}


def compile_ptx(host, *args) -> str:
    for path in glob.glob(f"{DUMP}/*.ptx"):
        os.remove(path)
    cute.compile(host, *args, make_fake_stream())
    (path,) = glob.glob(f"{DUMP}/*.ptx")
    with open(path) as f:
        return f.read()


def stored_constants(ptx: str) -> list[int]:
    """The 64-bit words the kernel stores to out[0], out[1], ... when its shared memory starts at address 0."""
    values = {}
    for dst, src, const in re.findall(r"(?:or\.b64|add\.s64)\s+(%rd\d+), (%rd\d+), (-?\d+);", ptx):
        values[dst] = values.get(src, 0) + int(const)
    stores = re.findall(r"st\.global\.b64\s+\[%rd\d+(?:\+(\d+))?\], (%rd\d+);", ptx)
    return [values.get(src, 0) % 2**64 for _, src in sorted(stores, key=lambda s: int(s[0] or 0))]


def table(layout, rows, cols, at=lambda i, j: (i, j)):
    """[rows, cols] of layout(at(i, j)). A plain CuTe layout adds up over its modes, so one row and one column give all;
    the far corner is evaluated as a check."""
    down = np.array([cute.crd2idx(at(i, 0), layout) for i in range(rows)])
    right = np.array([cute.crd2idx(at(0, j), layout) for j in range(cols)])
    full = down[:, None] + right[None, :] - down[0]
    assert full[-1, -1] == cute.crd2idx(at(rows - 1, cols - 1), layout)
    return full


def swizzle_table():
    """CuTe's Swizzle<B, 4, 3> on every byte of 8 KiB."""

    @cute.jit
    def host():
        for bits, name in enumerate(("none", "32B", "64B", "128B")):
            lay = cute.make_composed_layout(cute.make_swizzle(bits, 4, 3), 0, cute.make_layout(8192))
            TABLES[f"swizzle/{name}"] = np.array([cute.crd2idx(i, lay) for i in range(0, 8192, 16)])

    host()


def smem_case(arch, kind, major, swizzle, mn, k_tile):
    """Operand tile [mn, k_tile] of CuTe's smem layout (elements before the swizzle) and the descriptor of each k
    block."""
    dtype, pack = TYPES[kind], warpgroup if arch == "sm_90a" else tcgen05
    k = 8 if kind == "tf32" else 16
    atom_kind = getattr(pack.SmemLayoutAtomKind, f"{major}_{SWIZZLES[swizzle]}")
    order = (0, 1) if major == "K" else (1, 0)
    name = f"smem/{kind}/{major}/{swizzle}/{mn}x{k_tile}"

    @cute.kernel
    def kern(out: cute.Tensor, mma: cute.TiledMma, lay: cute.ComposedLayout):
        smem = cutlass.memory.SmemAllocator()
        s = smem.allocate_tensor(dtype, lay.outer, 1024, swizzle=lay.inner)
        frag = mma.make_fragment_A(mma.get_slice(0).partition_A(s) if cutlass.const_expr(arch == "sm_90a") else s)
        for j in cutlass.range_constexpr(k_tile // k):
            out[j] = smem_descriptor_to_int(frag[(None, 0, j)].iterator)

    @cute.jit
    def host(out: cute.Tensor, stream):
        if cutlass.const_expr(arch == "sm_90a"):
            mma = cutlass.utils.hopper_helpers.make_trivial_tiled_mma(
                dtype, dtype, MAJORS[major], OperandMajorMode.K, cutlass.Float32, (1, 1, 1), (mn, 64)
            )
            lay = cute.tile_to_shape(warpgroup.make_smem_layout_atom(atom_kind, dtype), (mn, k_tile), order=order)
            TABLES[name] = table(lay.outer, mn, k_tile)
        else:
            mma = cutlass.utils.blackwell_helpers.make_trivial_tiled_mma(
                dtype,
                MAJORS[major],
                OperandMajorMode.K,
                cutlass.Float32,
                tcgen05.CtaGroup.ONE,
                (mn, 64),
                tcgen05.OperandSource.SMEM,
            )
            lay = tcgen05.tile_to_mma_shape(
                tcgen05.make_smem_layout_atom(atom_kind, dtype),
                mma.partition_shape_A((mn, k_tile)),
                order=(1, 2) if major == "K" else (2, 1),
            )
            TABLES[name] = table(lay.outer, mn, k_tile, lambda i, j: ((i, j % k), 0, j // k))
        kern(out, mma, lay).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)

    ptx = compile_ptx(host, make_fake_compact_tensor(cutlass.Int64, (64,)))
    TABLES[name + "/desc"] = np.array(stored_constants(ptx), dtype=np.uint64)


def wgmma_fragments():
    """[thread, value] -> row + 64 * column for D of several N and for A from registers."""

    @cute.jit
    def host():
        for n in (8, 64, 128, 256):
            op = warpgroup.MmaF16BF16Op(
                cutlass.BFloat16,
                cutlass.Float32,
                (64, n, 16),
                warpgroup.OperandSource.RMEM,
                OperandMajorMode.K,
                OperandMajorMode.K,
            )
            mma = cute.make_tiled_mma(cute.make_mma_atom(op))
            TABLES[f"wgmma/D/{n}"] = table(mma.tv_layout_C, 128, n // 2)
        TABLES["wgmma/A"] = table(mma.tv_layout_A, 128, 8)

    host()


def warp_fragments():
    """mma.sync m16n8k16: [thread, value] -> row + 16 * column for C, A, and n + 8 k for B."""

    @cute.jit
    def host():
        mma = cute.make_tiled_mma(
            cute.make_mma_atom(cute.nvgpu.warp.MmaF16BF16Op(cutlass.BFloat16, cutlass.Float32, (16, 8, 16)))
        )
        for which, values in (("C", 4), ("A", 8), ("B", 4)):
            TABLES[f"warp/{which}"] = table(getattr(mma, f"tv_layout_{which}"), 32, values)
        for name, op in (
            ("k8", cute.nvgpu.warp.MmaF16BF16Op(cutlass.BFloat16, cutlass.Float32, (16, 8, 8))),
            ("tf32k8", cute.nvgpu.warp.MmaTF32Op((16, 8, 8))),
            ("tf32k4", cute.nvgpu.warp.MmaTF32Op((16, 8, 4))),
        ):
            mma = cute.make_tiled_mma(cute.make_mma_atom(op))
            for which in "AB":
                tv = getattr(mma, f"tv_layout_{which}")
                TABLES[f"warp/{name}/{which}"] = table(tv, 32, cute.size(tv, mode=[1]))

    host()


LOADS = [
    ("16x64b", "Ld16x64bOp"),
    ("16x128b", "Ld16x128bOp"),
    ("16x256b", "Ld16x256bOp"),
    ("32x32b", "Ld32x32bOp"),
    ("16x32bx2", "Ld16x32bx2Op"),
]
STORES = [(shape, op.replace("Ld", "St")) for shape, op in LOADS]


def tmem_copies():
    """Of each ld/st atom, fp32: [thread, register] -> cell, lane-major over the cells the instruction touches."""

    @cute.jit
    def host():
        for ops, side in ((LOADS, "dst"), (STORES, "src")):
            for shape, op in ops:
                for num in (1, 2, 8, 16):
                    atom = cute.make_copy_atom(getattr(tcgen05, op)(tcgen05.Repetition(num)), cutlass.Float32)
                    tv = atom.layout_dst_tv if side == "dst" else atom.layout_src_tv
                    TABLES[f"tmem/{side}/{shape}/{num}"] = table(tv, 32, cute.size(tv, mode=[1]))

    host()


def accumulators():
    """Tensor-memory address (lane << 16 | column) of each D[i, j], and which D elements each thread of a warpgroup
    loads."""
    cases = [
        (64, 64, "16x256b", "Ld16x256bOp", 8),
        (64, 128, "16x256b", "Ld16x256bOp", 4),
        (128, 64, "32x32b", "Ld32x32bOp", 16),
        (128, 128, "32x32b", "Ld32x32bOp", 32),
        (64, 32, "16x64b", "Ld16x64bOp", 16),
        (64, 64, "16x128b", "Ld16x128bOp", 16),
    ]

    @cute.jit
    def host():
        for m, n, shape, op, num in cases:
            mma = cutlass.utils.blackwell_helpers.make_trivial_tiled_mma(
                cutlass.BFloat16,
                OperandMajorMode.K,
                OperandMajorMode.K,
                cutlass.Float32,
                tcgen05.CtaGroup.ONE,
                (m, n),
                tcgen05.OperandSource.SMEM,
            )
            acc = mma.make_fragment_C(mma.partition_shape_C((m, n)))[((None, None), 0, 0)]
            TABLES[f"acc/{m}x{n}"] = table(acc.layout, m, n)
            copy = tcgen05.make_tmem_copy(
                cute.make_copy_atom(getattr(tcgen05, op)(tcgen05.Repetition(num)), cutlass.Float32), acc
            )
            parts = [copy.get_slice(t).partition_D(cute.make_identity_tensor((m, n))) for t in range(128)]
            first = np.array([p[0] for p in parts])  # coordinates add up too: thread part plus value part
            values = np.array([parts[0][i] for i in range(cute.size(parts[0]))])
            TABLES[f"load/{m}x{n}/{shape}/{num}"] = first[:, None] + values[None, :] - first[0]
            assert tuple(TABLES[f"load/{m}x{n}/{shape}/{num}"][-1, -1]) == parts[-1][len(values) - 1]
            ts = cutlass.utils.blackwell_helpers.make_trivial_tiled_mma(
                cutlass.BFloat16,
                OperandMajorMode.K,
                OperandMajorMode.K,
                cutlass.Float32,
                tcgen05.CtaGroup.ONE,
                (m, n),
                tcgen05.OperandSource.TMEM,
            )
            a = ts.make_fragment_A(ts.partition_shape_A((m, 64)))
            TABLES[f"tmem_a/{m}"] = table(a.layout, m, 64, lambda i, j: ((i, j % 16), 0, j // 16))

    host()


def packed_loads():
    """Which elements of an fp16 accumulator (one a column, in CuTe's layout) each thread gets from .pack::16b loads."""

    @cute.jit
    def host():
        for m, shape, op, num in (
            (128, "32x32b", "Ld32x32bOp", 16),
            (64, "16x256b", "Ld16x256bOp", 2),
            (64, "16x64b", "Ld16x64bOp", 4),
            (64, "16x128b", "Ld16x128bOp", 4),
        ):
            mma = cutlass.utils.blackwell_helpers.make_trivial_tiled_mma(
                cutlass.Float16,
                OperandMajorMode.K,
                OperandMajorMode.K,
                cutlass.Float16,
                tcgen05.CtaGroup.ONE,
                (m, 64),
                tcgen05.OperandSource.SMEM,
            )
            acc = mma.make_fragment_C(mma.partition_shape_C((m, 64)))[((None, None), 0, 0)]
            TABLES[f"acc16/{m}x64"] = table(acc.layout, m, 64)
            pack = tcgen05.Pack.PACK_16b_IN_32b
            atom = cute.make_copy_atom(getattr(tcgen05, op)(tcgen05.Repetition(num), pack), cutlass.Float16)
            copy = tcgen05.make_tmem_copy(atom, acc)
            parts = [copy.get_slice(t).partition_D(cute.make_identity_tensor((m, 64))) for t in range(128)]
            TABLES[f"packed/{m}/{shape}/{num}"] = np.array([[p[i] for i in range(cute.size(p))] for p in parts])

    host()


def instruction_descriptor(m, n, major_a, major_b, kind):
    """The idesc constant in the PTX of a real cute.gemm (no negation)."""
    dtype = {"bf16": cutlass.BFloat16, "f16": cutlass.Float16, "tf32": cutlass.TFloat32}[kind]
    sm100 = cutlass.utils.blackwell_helpers

    @cute.kernel
    def kern(mma: cute.TiledMma, la: cute.ComposedLayout, lb: cute.ComposedLayout):
        smem = cutlass.memory.SmemAllocator()
        a = mma.make_fragment_A(smem.allocate_tensor(dtype, la.outer, 1024, swizzle=la.inner))
        b = mma.make_fragment_B(smem.allocate_tensor(dtype, lb.outer, 1024, swizzle=lb.inner))
        acc = mma.make_fragment_C(mma.partition_shape_C((m, n)))
        cute.gemm(mma, acc, a[(None, None, 0, 0)], b[(None, None, 0, 0)], acc)

    @cute.jit
    def host(stream):
        mma = sm100.make_trivial_tiled_mma(
            dtype,
            MAJORS[major_a],
            MAJORS[major_b],
            cutlass.Float32,
            tcgen05.CtaGroup.ONE,
            (m, n),
            tcgen05.OperandSource.SMEM,
        )
        tile = (m, n, 64)
        kern(mma, sm100.make_smem_layout_a(mma, tile, dtype, 1), sm100.make_smem_layout_b(mma, tile, dtype, 1)).launch(
            grid=(1, 1, 1), block=(32, 1, 1), stream=stream
        )

    ptx = compile_ptx(host)
    (base,) = re.findall(r"selp\.b32\s+%r\d+, \d+, (\d{6,}), %p\d+;", ptx)
    (opcode,) = re.findall(r"(tcgen05\.mma\S+)", ptx)
    TABLES[f"idesc/{kind}/{m}x{n}/{major_a}{major_b}"] = np.array(int(base))
    TABLES[f"idesc/{kind}/{m}x{n}/{major_a}{major_b}/opcode"] = np.array(opcode)


def main(arch, out):
    assert os.environ["CUTE_DSL_ARCH"] == arch
    swizzle_table()
    for kind, major in (("bf16", "K"), ("bf16", "MN"), *((("tf32", "K"),) if arch == "sm_100a" else ())):
        for swizzle in SWIZZLES:
            smem_case(arch, kind, major, swizzle, 64, 64)
    if arch == "sm_90a":
        wgmma_fragments()
        warp_fragments()
    else:
        smem_case(arch, "bf16", "K", "128B", 128, 128)
        smem_case(arch, "bf16", "MN", "128B", 128, 64)
        tmem_copies()
        accumulators()
        packed_loads()
        instruction_descriptor(64, 128, "K", "MN", "bf16")
        instruction_descriptor(128, 64, "MN", "K", "f16")
        instruction_descriptor(128, 256, "K", "K", "tf32")
    np.savez(out, **TABLES)


if __name__ == "__main__":
    main(*sys.argv[1:])
