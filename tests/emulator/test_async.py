"""mbarriers, bulk copies, wgmma and tcgen05 in small hand-written programs, under several schedules."""

import numpy as np
import pytest
import torch

import emulator
from emulator.hw import matrix_desc, tensormap
from emulator.hw.tma import swizzle
from ptx_programs import HEAD

SEEDS = [None, 1, 2, 3]
WAIT = "{{ .reg .pred P; W: mbarrier.try_wait.parity.shared.b64 P, [{bar}], {parity}; @P bra D; bra W; D: }}"


def kernel(body, params, shared=1024, arch="sm_90a", regs=""):
    p = ", ".join(f".param {t} {n}" for n, t in params.items())
    return (
        HEAD.format(arch=arch)
        + f"""
.visible .entry k({p})
{{ .reg .pred %p<8>; .reg .b32 %r<40>; .reg .b64 %rd<20>; .reg .b32 %f<80>; {regs}
  .shared .align 1024 .b8 buf[{shared}]; .shared .align 8 .b8 bar[64];
  mov.u32 %r1, %tid.x; mov.u32 %r2, buf; mov.u32 %r3, bar; setp.eq.u32 %p1, %r1, 0;
{body}
  ret; }}"""
    )


def ring(wait_empty=True, wait_full=True):
    """Warp 0 fills a two-slot ring four times with numbered words, warp 1 empties it into dst."""
    return kernel(
        f"""
  @%p1 mbarrier.init.shared.b64 [%r3], 32;  @%p1 mbarrier.init.shared.b64 [%r3+8], 32;
  @%p1 mbarrier.init.shared.b64 [%r3+16], 32;  @%p1 mbarrier.init.shared.b64 [%r3+24], 32;
  bar.sync 0;
  and.b32 %r4, %r1, 31; mov.b32 %r5, 0; setp.ge.u32 %p2, %r1, 32;
LOOP:
  and.b32 %r6, %r5, 1; shr.u32 %r7, %r5, 1; and.b32 %r7, %r7, 1; xor.b32 %r8, %r7, 1;
  mad.lo.u32 %r9, %r6, 8, %r3; add.u32 %r10, %r9, 16;
  mad.lo.u32 %r11, %r6, 128, %r2; mad.lo.u32 %r11, %r4, 4, %r11;
  @%p2 bra CONSUME;
  {WAIT.format(bar="%r10", parity="%r8") if wait_empty else ""}
  mad.lo.u32 %r12, %r5, 100, %r4; st.shared.u32 [%r11], %r12;
  mbarrier.arrive.shared.b64 _, [%r9];
  bra NEXT;
CONSUME:
  {WAIT.format(bar="%r9", parity="%r7") if wait_full else ""}
  ld.shared.u32 %r12, [%r11];
  ld.param.u64 %rd1, [dst]; mad.lo.u32 %r13, %r5, 32, %r4; mad.wide.u32 %rd1, %r13, 4, %rd1; st.global.u32 [%rd1], %r12;
  mbarrier.arrive.shared.b64 %rd2, [%r10];
NEXT:
  add.u32 %r5, %r5, 1; setp.lt.u32 %p3, %r5, 8; @%p3 bra LOOP;""",
        {"dst": ".u64"},
    )


WANT = (np.arange(8)[:, None] * 100 + np.arange(32)).ravel().tolist()


@pytest.mark.parametrize("seed", SEEDS)
def test_ring(seed):
    y = np.zeros(256, np.uint32)
    emulator.run(ring(), "k", 1, 64, 0, [y], seed=seed)
    assert y.tolist() == WANT


@pytest.mark.parametrize("broken", [{"wait_empty": False}, {"wait_full": False}])
def test_ring_without_a_wait_is_wrong_somewhere(broken):
    bad = 0
    for seed in range(8):
        y = np.zeros(256, np.uint32)
        try:
            emulator.run(ring(**broken), "k", 1, 64, 0, [y], seed=seed)
            bad += y.tolist() != WANT
        except emulator.Deadlock:  # one side ran phases ahead of the other
            bad += 1
    assert bad


def test_deadlock_names_barrier_and_phase():
    text = ring().replace("mbarrier.arrive.shared.b64 %rd2, [%r10];", "")
    with pytest.raises(emulator.Deadlock, match=r"parity 0: .*32 of 32 arrivals"):
        emulator.run(text, "k", 1, 64, 0, [np.zeros(256, np.uint32)])


def test_barrier_misuse():
    with pytest.raises(emulator.ProtocolError, match="no initialised mbarrier"):
        emulator.run(kernel("mbarrier.arrive.shared.b64 _, [%r3];", {}), "k", 1, 32, 0, [])
    with pytest.raises(emulator.ProtocolError, match="only 0|pending"):
        emulator.run(
            kernel(
                "@%p1 mbarrier.init.shared.b64 [%r3], 41; bar.warp.sync -1; mbarrier.arrive.shared.b64 _, [%r3], 2;", {}
            ),
            "k",
            1,
            32,
            0,
            [],
        )


def bulk(wait=True, expect=512, stores="cp.async.bulk.wait_group 0;"):
    return kernel(
        f"""
  @%p1 mbarrier.init.shared.b64 [%r3], 1; fence.mbarrier_init.release.cluster; bar.sync 0;
  ld.param.u64 %rd1, [src]; ld.param.u64 %rd2, [dst];
  @!%p1 bra GO;
  mbarrier.arrive.expect_tx.shared.b64 _, [%r3], {expect};
  cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%rd1], 512, [%r3];
GO: {WAIT.format(bar="%r3", parity=0) if wait else ""}
  mad.lo.u32 %r5, %r1, 4, %r2; ld.shared.u32 %r6, [%r5]; add.u32 %r6, %r6, 7; st.shared.u32 [%r5], %r6;
  fence.proxy.async.shared::cta; bar.sync 0;
  @!%p1 bra END;
  cp.async.bulk.global.shared::cta.bulk_group [%rd2], [%r2], 512; cp.async.bulk.commit_group; {stores}
END: """,
        {"src": ".u64", "dst": ".u64"},
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_bulk_copy_through_shared(seed):
    x, y = np.arange(128, dtype=np.uint32), np.zeros(128, np.uint32)
    emulator.run(bulk(), "k", 1, 128, 0, [x, y], seed=seed)
    assert (y == x + 7).all()


def test_bulk_copy_faults():
    x, y = np.arange(128, dtype=np.uint32), np.zeros(128, np.uint32)
    with pytest.raises(emulator.ProtocolError, match="CTA ended while.*cp.async.bulk.shared"):
        emulator.run(bulk(wait=False), "k", 1, 128, 0, [x, y])
    assert (y != x + 7).any()  # the data had not arrived
    with pytest.raises(emulator.Deadlock, match="-?16 bytes missing"):
        emulator.run(bulk(expect=528), "k", 1, 128, 0, [x, y])
    with pytest.raises(emulator.MemoryFault, match="parameter src"):
        emulator.run(bulk(), "k", 1, 128, 0, [x[:100].copy(), y])


def tma_round_trip(dims, box, coords, mode, load_only=False):
    """Load a box of a bf16 tensor, keep a raw copy of shared memory, store the box to another tensor at the same
    coordinates."""
    rank = len(dims)
    c = ", ".join(f"%r{20 + i}" for i in range(rank))
    n = int(np.prod(box)) * 2
    body = f"""
  @%p1 mbarrier.init.shared.b64 [%r3], 1; bar.sync 0;
  {" ".join(f"mov.b32 %r{20 + i}, {v};" for i, v in enumerate(coords))}
  mov.b64 %rd1, map0; cvta.param.u64 %rd1, %rd1; mov.b64 %rd2, map1; cvta.param.u64 %rd2, %rd2;
  @!%p1 bra GO;
  prefetch.tensormap [%rd1];
  mbarrier.arrive.expect_tx.shared.b64 _, [%r3], {n};
  cp.async.bulk.tensor.{rank}d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r2], [%rd1, {{{c}}}], [%r3];
GO: {WAIT.format(bar="%r3", parity=0)}
  ld.param.u64 %rd3, [raw]; mov.b32 %r5, %r1;
COPY: setp.ge.u32 %p2, %r5, {n // 4}; @%p2 bra DONE;
  mad.lo.u32 %r6, %r5, 4, %r2; ld.shared.u32 %r7, [%r6]; mad.wide.u32 %rd4, %r5, 4, %rd3; st.global.u32 [%rd4], %r7;
  add.u32 %r5, %r5, 32; bra COPY;
DONE: bar.warp.sync -1;
  @!%p1 bra END;
  cp.async.bulk.tensor.{rank}d.global.shared::cta.tile.bulk_group [%rd2, {{{c}}}], [%r2];
  cp.async.bulk.commit_group; cp.async.bulk.wait_group.read 0;
END: """
    text = kernel(body, {"map0": ".align 64 .b8", "map1": ".align 64 .b8", "raw": ".u64"}, shared=max(n, 1024))
    text = text.replace("map0,", "map0[128],").replace("map1,", "map1[128],")
    src = torch.arange(1, int(np.prod(dims)) + 1).float().bfloat16().reshape(*reversed(dims))
    dst, raw = torch.zeros_like(src), np.zeros(n // 4, np.uint32)
    strides = [2 * int(np.prod(dims[:i])) for i in range(1, rank)]
    maps = [
        tensormap.encode(address=t.data_ptr(), dtype="bf16", dims=dims, strides=strides, box=box, swizzle=mode)
        for t in (src, dst)
    ]
    device = emulator.Device("sm_90a")
    device.memory.add(src, "src"), device.memory.add(dst, "dst")
    device.launch(text, "k", 1, 32, 0, [maps[0], maps[1], raw])
    return src, dst, raw


@pytest.mark.parametrize(
    "dims, box, coords, mode",
    [
        ((64, 16), (64, 8), (0, 4), "128B"),
        ((40, 20), (32, 8), (16, 15), "64B"),
        ((64, 6, 3), (16, 4, 2), (32, 3, 2), "32B"),
        ((32, 10, 2, 2), (8, 4, 1, 2), (24, 8, 1, 0), "none"),
        ((200,), (64,), (160,), "none"),
        ((24, 5, 3, 2, 3), (8, 2, 2, 1, 2), (16, 4, 2, 1, 2), "none"),
    ],
)
def test_tensor_copies(dims, box, coords, mode):
    src, dst, raw = tma_round_trip(dims, box, coords, mode)
    shape = tuple(reversed(box))
    inside, tile = torch.zeros_like(src, dtype=torch.bool), torch.zeros(shape, dtype=torch.bfloat16)
    for i in np.ndindex(*shape):
        at = tuple(a + c for a, c in zip(i, reversed(coords)))
        if all(0 <= a < d for a, d in zip(at, src.shape)):
            inside[at] = True
            tile[i] = src[at]
    assert (dst[inside] == src[inside]).all() and (dst[~inside] == 0).all()
    flat = tile.reshape(-1).view(torch.int16).numpy().view(np.uint16)
    at = swizzle(1024 + 2 * np.arange(len(flat)), mode) - 1024
    assert (raw.view(np.uint16)[at // 2] == flat).all()


# one wgmma m64n64k16 with B in 128-byte swizzled shared memory, K-major, and A from registers or from shared memory
def wgmma_program(a_registers, wait="wgmma.wait_group.sync.aligned 0;", fence="wgmma.fence.sync.aligned;"):
    acc = ", ".join(f"%f{i}" for i in range(32))
    fill = "".join(
        f"ld.param.u64 %rd5, [c]; add.u64 %rd6, %rd5, %rd7; ld.global.b32 %f{i}, [%rd6+{4 * i}];" for i in range(32)
    )
    load_a = "".join(f"ld.global.b32 %f{32 + i}, [%rd9+{4 * i}];" for i in range(4))
    store = "".join(f"st.global.b32 [%rd6+{4 * i}], %f{i};" for i in range(32))
    a = "{%f32, %f33, %f34, %f35}" if a_registers else "%rd11"
    tail = "p, 1, 1, 0" if a_registers else "p, 1, 1, 0, 0"
    return kernel(
        f"""
  ld.param.u64 %rd1, [image];
COPY: mad.lo.u32 %r4, %r1, 16, %r2; mul.wide.u32 %rd2, %r1, 16; add.u64 %rd2, %rd1, %rd2; mov.b32 %r5, 0;
L: ld.global.v4.b32 {{%r10, %r11, %r12, %r13}}, [%rd2]; st.shared.v4.b32 [%r4], {{%r10, %r11, %r12, %r13}};
  add.u32 %r4, %r4, 2048; add.u64 %rd2, %rd2, 2048; add.u32 %r5, %r5, 1; setp.lt.u32 %p2, %r5, 8; @%p2 bra L;
  fence.proxy.async.shared::cta; bar.sync 0;
  ld.param.u64 %rd10, [bdesc]; ld.param.u64 %rd11, [adesc];
  mul.wide.u32 %rd7, %r1, 128; {fill}
  ld.param.u64 %rd8, [a]; mul.wide.u32 %rd9, %r1, 16; add.u64 %rd9, %rd8, %rd9; {load_a}
  {fence}
  {{ .reg .pred p; setp.ne.b32 p, 1, 0;
  wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {{{acc}}}, {a}, %rd10, {tail}; }}
  wgmma.commit_group.sync.aligned; {wait}
  {store}""",
        {"image": ".u64", "a": ".u64", "c": ".u64", "bdesc": ".u64", "adesc": ".u64"},
        shared=16384,
    )


def k_major_image(matrix, base):
    """128-byte swizzled image of a [rows, 64] bf16 matrix placed at shared offset `base`."""
    flat = matrix.reshape(-1).view(torch.int16).numpy().view(np.uint16)
    out = np.zeros(len(flat), np.uint16)
    out[(swizzle(base + 2 * np.arange(len(flat)), "128B") - base) // 2] = flat
    return out


def wgmma_inputs():
    torch.manual_seed(3)
    a, b, c = torch.randn(64, 64).bfloat16(), torch.randn(64, 64).bfloat16(), torch.randn(64, 64)
    image = np.concatenate([k_major_image(b, 0), k_major_image(a, 8192)])
    desc = [matrix_desc.encode_wgmma(matrix_desc.MatrixDesc(start, 16, 1024, "128B")) for start in (0, 8192)]
    t = np.arange(128)
    row, pair = 16 * (t // 32) + t % 32 // 4, 2 * (t % 4)  # figure of the m64nNk16 fragments, by hand
    areg = torch.stack([a[row + 8 * (e // 2 % 2), pair + e % 2 + 8 * (e // 4)] for e in range(8)], 1)
    creg = torch.stack([c[row + 8 * (i // 2 % 2), 8 * (i // 4) + pair + i % 2] for i in range(32)], 1)
    want = c.double() + a[:, :16].double() @ b[:, :16].double().T
    wreg = torch.stack([want[row + 8 * (i // 2 % 2), 8 * (i // 4) + pair + i % 2] for i in range(32)], 1)
    return image, areg, creg, desc, wreg


@pytest.mark.parametrize("a_registers", [True, False])
@pytest.mark.parametrize("seed", [None, 1])
def test_wgmma(a_registers, seed):
    image, areg, creg, desc, want = wgmma_inputs()
    emulator.run(
        wgmma_program(a_registers), "k", 1, 128, 0, [image, areg.contiguous(), creg, desc[0], desc[1]], seed=seed
    )
    assert (creg.double() - want).abs().max() < 1e-5


def test_wgmma_without_wait_or_fence_is_refused():
    image, areg, creg, desc, _ = wgmma_inputs()
    args = [image, areg.contiguous(), creg, desc[0], desc[1]]
    with pytest.raises(emulator.ProtocolError, match=r"has not waited.*st.global"):
        emulator.run(wgmma_program(True, wait=""), "k", 1, 128, 0, args)
    with pytest.raises(emulator.ProtocolError, match="since the last wgmma.fence"):
        emulator.run(wgmma_program(True, fence=""), "k", 1, 128, 0, args)
    with pytest.raises(emulator.UnsupportedInstruction, match="does not exist on sm_100a"):
        emulator.run(wgmma_program(True), "k", 1, 128, 0, args, arch="sm_100a")


def tcgen05_program(wait_mma=True, wait_ld="tcgen05.wait::ld.sync.aligned;", dealloc=True):
    """D[128, 64] = A[128, 16] B[64, 16]^T on tensor memory, twice (the second accumulates), read back by four warps."""
    regs = ", ".join(f"%f{i}" for i in range(64))
    store = "".join(f"st.global.b32 [%rd6+{4 * i}], %f{i};" for i in range(64))
    mma = "tcgen05.mma.cta_group::1.kind::f16 [%r6], %rd11, %rd10, %r7, {%r8, %r8, %r8, %r8}, "
    return kernel(
        f"""
  ld.param.u64 %rd1, [image];
  mad.lo.u32 %r4, %r1, 16, %r2; mul.wide.u32 %rd2, %r1, 16; add.u64 %rd2, %rd1, %rd2; mov.b32 %r5, 0;
L: ld.global.v4.b32 {{%r10, %r11, %r12, %r13}}, [%rd2]; st.shared.v4.b32 [%r4], {{%r10, %r11, %r12, %r13}};
  add.u32 %r4, %r4, 2048; add.u64 %rd2, %rd2, 2048; add.u32 %r5, %r5, 1; setp.lt.u32 %p2, %r5, 12; @%p2 bra L;
  setp.ge.u32 %p3, %r1, 32; add.u32 %r9, %r3, 16;
  @%p3 bra NOALLOC; tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r9], 64;
NOALLOC:
  @%p1 mbarrier.init.shared.b64 [%r3], 1;
  fence.proxy.async.shared::cta; bar.sync 0;
  ld.shared.b32 %r6, [%r9]; ld.param.u64 %rd10, [bdesc]; ld.param.u64 %rd11, [adesc];
  ld.param.u32 %r7, [idesc]; mov.b32 %r8, 0;
  setp.ne.u32 %p4, %r8, 0; setp.eq.u32 %p5, %r8, 0;
  @!%p1 bra GO;
  {mma} %p4; {mma} %p5;
  tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r3];
GO: {WAIT.format(bar="%r3", parity=0) if wait_mma else ""}
  shr.u32 %r14, %r1, 5; shl.b32 %r14, %r14, 21; add.u32 %r14, %r14, %r6;
  tcgen05.ld.sync.aligned.32x32b.x64.b32 {{{regs}}}, [%r14]; {wait_ld}
  ld.param.u64 %rd5, [d]; mul.wide.u32 %rd6, %r1, 256; add.u64 %rd6, %rd5, %rd6; {store}
  bar.sync 0;
  @%p3 bra END; {"tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r6, 64;" if dealloc else ""}
END: """,
        {"image": ".u64", "d": ".u64", "bdesc": ".u64", "adesc": ".u64", "idesc": ".u32"},
        shared=24576,
        arch="sm_100a",
    )


def tcgen05_inputs():
    torch.manual_seed(4)
    a, b = torch.randn(128, 64).bfloat16(), torch.randn(64, 64).bfloat16()
    image = np.concatenate([k_major_image(b, 0), k_major_image(a, 8192)])
    desc = [matrix_desc.encode_tcgen05(matrix_desc.MatrixDesc(start, 16, 1024, "128B")) for start in (0, 8192)]
    # PTX ISA, instruction descriptor: D f32 (bits 4-5 = 1), A and B bf16 (1 at 7 and 10), N >> 3 at 17, M >> 4 at 24
    idesc = 1 << 4 | 1 << 7 | 1 << 10 | (64 >> 3) << 17 | (128 >> 4) << 24
    return image, desc, idesc, 2 * a[:, :16].double() @ b[:, :16].double().T


@pytest.mark.parametrize("seed", SEEDS)
def test_tcgen05(seed):
    image, desc, idesc, want = tcgen05_inputs()
    d = torch.zeros(128, 64)
    emulator.run(tcgen05_program(), "k", 1, 128, 0, [image, d, desc[0], desc[1], idesc], arch="sm_100a", seed=seed)
    assert (d.double() - want).abs().max() < 1e-4


def test_tcgen05_faults():
    image, desc, idesc, want = tcgen05_inputs()
    d = torch.zeros(128, 64)

    def run(**broken):
        emulator.run(tcgen05_program(**broken), "k", 1, 128, 0, [image, d, desc[0], desc[1], idesc], arch="sm_100a")

    with pytest.raises(emulator.ProtocolError, match="tcgen05.wait::ld"):
        run(wait_ld="")
    with pytest.raises(emulator.ProtocolError, match="without freeing tensor memory: columns 0-63"):
        run(dealloc=False)
    with pytest.raises(emulator.ProtocolError, match="CTA ended while.*tcgen05.mma"):
        run(wait_mma=False)
    assert not (d.double() - want).abs().max() < 1e-4  # and what was read back was not the product


def test_errors_of_the_units_name_their_place():
    with pytest.raises(emulator.ProtocolError, match=r"count 0.*\[kernel k, CTA .*PTX line \d+: .*mbarrier.init"):
        emulator.run(kernel("@%p1 mbarrier.init.shared.b64 [%r3], 0;", {}), "k", 1, 32, 0, [])
