"""The race watcher: silent on correct programs under several schedules, and right about what is missing otherwise."""

import re

import numpy as np
import pytest
import torch

import emulator
from emulator.cute_host import EmulatedTarget
from emulator.races import Races
from test_async import WANT, bulk, kernel, ring, wgmma_inputs
from test_cute import operands, run_state
from test_machine import REVERSE

SEEDS = [None, 1, 2]


def findings(text, block, params, seed=None, name="k", smem=0):
    watch = Races()
    emulator.run(text, name, 1, block, smem, params, seed=seed, watch=watch)
    return watch.report()


@pytest.mark.parametrize("seed", SEEDS)
def test_correct_programs_are_silent(seed):
    y = np.zeros(256, np.uint32)
    assert findings(ring(), 64, [y], seed) == [] and y.tolist() == WANT
    x, y = np.arange(128, dtype=np.uint32), np.zeros(128, np.uint32)
    assert findings(bulk(), 128, [x, y], seed) == []
    assert findings(REVERSE.replace("BARRIER", "bar.sync 0;"), 128, [x, y], seed, "reverse", 512) == []


def test_missing_barrier_needs_no_unlucky_schedule():
    x, y = np.arange(128, dtype=np.uint32), np.zeros(128, np.uint32)
    found = findings(REVERSE.replace("BARRIER", ""), 128, [x, y], None, "reverse", 512)
    assert (y == x[::-1]).all()  # this schedule happens to be right
    assert any("read after a write" in m and "ld.shared.u32" in m and "st.shared.u32" in m for m in found), found


def test_missing_proxy_fence():
    x, y = np.arange(128, dtype=np.uint32), np.zeros(128, np.uint32)
    text = bulk().replace("fence.proxy.async.shared::cta;", "")
    found = findings(text, 128, [x, y])
    assert (y == x + 7).all() and len(found) == 1
    assert "without fence.proxy.async" in found[0] and "cp.async.bulk.global" in found[0] and "st.shared" in found[0]


def test_missing_full_wait_of_a_ring():
    found = findings(ring(wait_full=False), 64, [np.zeros(256, np.uint32)])
    assert any("read of what nobody wrote" in m or "read after a write" in m for m in found), found


def test_missing_initialisation_barrier():
    text = ring().replace("bar.sync 0;", "bar.warp.sync -1;")
    found = findings(text, 64, [np.zeros(256, np.uint32)])
    assert any("before its mbarrier.init" in m for m in found), found


def test_bulk_store_outlives_the_cta():
    x, y = np.arange(128, dtype=np.uint32), np.zeros(128, np.uint32)
    with pytest.raises(emulator.ProtocolError, match="CTA ended while.*cp.async.bulk.global"):
        emulator.run(bulk(stores=""), "k", 1, 128, 0, [x, y])


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_state_kernel_is_clean(arch):
    for seed in SEEDS:
        watch = Races()
        run_state(EmulatedTarget(arch, seed=seed, watch=watch), operands(1, 200, 1, 64, 64))
        assert watch.report() == [], seed


@pytest.mark.parametrize("arch, source", [("sm_90a", "state_sm90.py"), ("sm_100a", "state_sm100.py")])
def test_state_kernel_without_proxy_fences(arch, source):
    watch = Races()
    edit = ("fence.proxy.async.shared::cta;", "")
    run_state(EmulatedTarget(arch, watch=watch), operands(1, 200, 1, 64, 64), edit)
    assert any("without fence.proxy.async" in m and f"{source}:" in m for m in watch.report())


@pytest.mark.parametrize("seed", SEEDS)
def test_bulk_store_that_nobody_waits_for(seed):
    """Even where the schedule happens to finish it: another warp keeps the CTA for a while."""
    x, y = np.arange(128, dtype=np.uint32), np.zeros(128, np.uint32)
    text = bulk(stores="").replace("END: ", "END: bar.sync 1; " + "add.u32 %r6, %r6, 1; " * 8 + "bar.sync 2;")
    try:
        found = findings(text, 128, [x, y], seed)
    except emulator.ProtocolError as e:
        found = [str(e)]
    assert len(found) == 1 and "CTA ended" in found[0] and "cp.async.bulk.global" in found[0], found


ACC = ", ".join(f"%f{i}" for i in range(32))
PRODUCT = f"""wgmma.fence.sync.aligned;
  {{{{ .reg .pred p; setp.ne.b32 p, %r18, 0;
  wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {{{{{ACC}}}}}, {{a}}, {{b}}, p, 1, 1, 0, 0; }}}}
  wgmma.commit_group.sync.aligned; mov.b32 %r18, 1;"""
TILE = """mov.b32 %r4, %r17; mov.u64 %rd2, %rd3; mov.b32 %r5, 0;
{label}: ld.global.v4.b32 {{%r10, %r11, %r12, %r13}}, [%rd2]; st.shared.v4.b32 [%r4], {{%r10, %r11, %r12, %r13}};
  add.u32 %r4, %r4, {step}; add.u64 %rd2, %rd2, {step}; add.u32 %r5, %r5, 1; setp.lt.u32 %p2, %r5, 4; @%p2 bra {label};
  fence.proxy.async.shared::cta;"""
TILES = {"image": ".u64", "d": ".u64", "desc0": ".u64", "desc1": ".u64"}
OWN = "bar.sync %r16, 128;"  # of one warpgroup


def two_warpgroups(filled=OWN, used=OWN, one_tile=False):
    """Each warpgroup fills a tile, multiplies it by itself, and fills it again; the second multiplies twice, in two groups.
    With one_tile it multiplies the first's tile, and nobody fills again. filled, used: the barriers behind either."""
    product = PRODUCT.format(a="%rd10", b="%rd10")
    return kernel(
        f"""
  shr.u32 %r15, %r1, 7; add.u32 %r16, %r15, 1; and.b32 %r14, %r1, 127; setp.eq.u32 %p3, %r15, 1; mov.b32 %r18, 0;
  ld.param.u64 %rd1, [image]; mul.wide.u32 %rd4, %r14, 16; mul.wide.u32 %rd5, %r15, 8192; add.u64 %rd3, %rd1, %rd4;
  add.u64 %rd3, %rd3, %rd5; mad.lo.u32 %r17, %r15, 8192, %r2; mad.lo.u32 %r17, %r14, 16, %r17;
  {TILE.format(label="FILL", step=2048)} {filled}
  ld.param.u64 %rd10, [desc0]; {"" if one_tile else "@%p3 ld.param.u64 %rd10, [desc1];"}
  @!%p3 bra ONCE;
  {product}
ONCE: {product}
  wgmma.wait_group.sync.aligned 0;
  {"" if one_tile else used + TILE.format(label="AGAIN", step=2048)}
  ld.param.u64 %rd6, [d]; mul.wide.u32 %rd7, %r1, 128; add.u64 %rd6, %rd6, %rd7;
  {"".join(f"st.global.b32 [%rd6+{4 * i}], %f{i};" for i in range(32))}""",
        TILES,
        shared=16384,
    )


def products(text, seed, threads=256):
    image, _, _, desc, _ = wgmma_inputs()
    d, watch = torch.zeros(threads, 32), Races()
    emulator.run(text, "k", 1, threads, 0, [image, d, *desc], seed=seed, watch=watch)
    return d, watch.report()


@pytest.mark.parametrize("seed", SEEDS)
def test_two_warpgroups_are_each_ordered_by_their_own_barriers_and_waits(seed):
    own, found = products(two_warpgroups(), seed)
    assert found == []
    same, found = products(two_warpgroups("bar.sync 0;", one_tile=True), seed)
    assert found == []
    assert torch.equal(own[:128], same[:128])
    assert (same[128:] - 2 * same[:128]).abs().max() < 1e-5  # the second warpgroup added the same product twice


@pytest.mark.parametrize("seed", SEEDS)
def test_each_warpgroup_needs_its_own_barrier(seed):
    _, found = products(two_warpgroups(""), seed)
    assert all(any(f"wgmma of warpgroup {group}" in m for m in found) for group in (0, 1)), found
    _, found = products(two_warpgroups("@!%p3 bar.sync 1, 128;"), seed)
    assert found and all("wgmma of warpgroup 1, issued" in m for m in found if "not ordered after warp" in m), found
    _, found = products(two_warpgroups(one_tile=True), seed)
    assert found and all(re.search("warpgroup 1, .*; not ordered after warp [0-3] |what nobody wrote", m) for m in found), found


def rows_of_a(own):
    """One warpgroup: B behind a barrier, then A's rows, each warp its own 16 or every warp some of all, without one."""
    at = "and.b32 %r6, %r1, 31; shr.u32 %r7, %r1, 5; mul.lo.u32 %r6, %r6, 16; mad.lo.u32 %r6, %r7, 2048, %r6;"
    return kernel(
        f"""
  ld.param.u64 %rd1, [image]; mul.wide.u32 %rd4, %r1, 16; add.u64 %rd3, %rd1, %rd4; mad.lo.u32 %r17, %r1, 16, %r2; mov.b32 %r18, 0;
  {TILE.format(label="B", step=2048)} bar.sync 0;
  {at if own else "mul.lo.u32 %r6, %r1, 16;"} add.u32 %r6, %r6, 8192;
  add.u32 %r17, %r2, %r6; cvt.u64.u32 %rd4, %r6; add.u64 %rd3, %rd1, %rd4;
  {TILE.format(label="A", step=512 if own else 2048)} bar.warp.sync -1;
  ld.param.u64 %rd10, [desc0]; ld.param.u64 %rd11, [desc1];
  {PRODUCT.format(a="%rd11", b="%rd10")} wgmma.wait_group.sync.aligned 0;""",
        TILES,
        shared=16384,
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_a_warp_reads_its_own_rows_of_a(seed):
    assert products(rows_of_a(True), seed, 128)[1] == []
    _, found = products(rows_of_a(False), seed, 128)
    assert any("wgmma of warpgroup 0" in m and "st.shared" in m for m in found), found
