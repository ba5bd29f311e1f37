"""Control flow, barriers, memory spaces and errors, on whole small programs and under varied schedules."""

import numpy as np
import pytest

import emulator
from emulator import launch
from ptx_programs import HEAD, lanes

SEEDS = [None, 1, 2, 3]


@pytest.mark.parametrize("seed", SEEDS)
def test_divergent_loop_reconverges(seed):
    """Each lane loops lane times; a full-mask shuffle afterwards needs all lanes back."""
    n = np.arange(96, dtype=np.uint32)
    body = """mov.b32 y0, 0; mov.b32 %r1, 0;
    LOOP: setp.ge.u32 %p1, %r1, x0; @%p1 bra END; add.u32 y0, y0, %r1; add.u32 %r1, %r1, 1; bra LOOP;
    END: shfl.sync.bfly.b32 y1, y0, 1, 31, -1;"""
    y, z = lanes(body, [n], [np.uint32, np.uint32], seed=seed)
    want = n * (n - 1) // 2
    assert y.tolist() == want.tolist() and z.tolist() == want[np.arange(96) ^ 1].tolist()


@pytest.mark.parametrize("seed", SEEDS)
def test_if_else_inside_warp(seed):
    x = np.arange(64, dtype=np.uint32)
    y = lanes(
        "and.b32 %r1, x0, 1; setp.eq.u32 %p1, %r1, 0; @%p1 bra EVEN; mul.lo.u32 y0, x0, 3; bra.uni J;"
        "EVEN: add.u32 y0, x0, 100; J: add.u32 y0, y0, 1;",
        [x],
        [np.uint32],
        seed=seed,
    )
    assert y.tolist() == [int(v) * 3 + 1 if v & 1 else int(v) + 101 for v in x]


REVERSE = (
    HEAD.format(arch="sm_90a")
    + """
.extern .shared .align 16 .b8 dyn[];
.visible .entry reverse(.param .u64 src, .param .u64 dst)
{
  .reg .b32 %r<8>; .reg .b64 %rd<8>; .shared .align 4 .b8 pad[12];
  mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.x; mov.u32 %r7, %ntid.x;
  mad.lo.u32 %r3, %r2, %r7, %r1;
  ld.param.u64 %rd1, [src]; ld.param.u64 %rd2, [dst];
  mad.wide.u32 %rd3, %r3, 4, %rd1;
  ld.global.u32 %r4, [%rd3];
  mov.u32 %r5, dyn;
  mad.lo.u32 %r6, %r1, 4, %r5;
  st.shared.u32 [%r6], %r4;
  BARRIER
  sub.u32 %r6, %r7, %r1; sub.u32 %r6, %r6, 1; mad.lo.u32 %r6, %r6, 4, %r5;
  ld.shared.u32 %r4, [%r6];
  mad.wide.u32 %rd3, %r3, 4, %rd2;
  st.global.u32 [%rd3], %r4;
  ret;
}"""
)


@pytest.mark.parametrize("seed", SEEDS)
def test_shared_memory_and_barrier(seed):
    x = np.arange(512, dtype=np.uint32)
    y = np.zeros_like(x)
    emulator.run(REVERSE.replace("BARRIER", "bar.sync 0;"), "reverse", 4, 128, 512, [x, y], seed=seed)
    assert (y.reshape(4, 128) == x.reshape(4, 128)[:, ::-1]).all()


def test_missing_barrier_shows_under_some_schedule():
    x = np.arange(512, dtype=np.uint32) + 1
    wrong = 0
    for seed in range(6):
        y = np.zeros_like(x)
        emulator.run(REVERSE.replace("BARRIER", ""), "reverse", 4, 128, 512, [x, y], seed=seed)
        wrong += not (y.reshape(4, 128) == x.reshape(4, 128)[:, ::-1]).all()
    assert wrong


def test_out_of_bounds_and_misaligned_name_the_place():
    x, y = np.arange(512, dtype=np.uint32), np.zeros(500, np.uint32)
    text = REVERSE.replace("BARRIER", "bar.sync 0;")
    with pytest.raises(emulator.MemoryFault, match=r"past the end of parameter dst.*CTA \(3,0,0\)|dst") as e:
        emulator.run(text, "reverse", 4, 128, 512, [x, y])
    assert "st.global.u32" in str(e.value) and "PTX line" in str(e.value)
    with pytest.raises(emulator.MemoryFault, match="shared memory write.*out of bounds"):
        emulator.run(text, "reverse", 1, 128, 256, [x, np.zeros(512, np.uint32)])
    with pytest.raises(emulator.MemoryFault, match="misaligned"):
        emulator.run(
            text.replace("ld.shared.u32 %r4, [%r6]", "ld.shared.u32 %r4, [%r6+2]"),
            "reverse",
            1,
            128,
            512,
            [x, np.zeros(512, np.uint32)],
        )


def two_roles(producer, consumer):
    """Warp 0 produces into shared memory, warp 1 consumes."""
    return (
        HEAD.format(arch="sm_90a")
        + f"""
.visible .entry k(.param .u64 dst)
{{ .reg .b32 %r<8>; .reg .b64 %rd<4>; .reg .pred %p<4>; .shared .align 16 .b8 buf[128];
  mov.u32 %r1, %tid.x; and.b32 %r2, %r1, 31; mov.u32 %r3, buf; mad.lo.u32 %r4, %r2, 4, %r3;
  setp.ge.u32 %p1, %r1, 32; @%p1 bra CONSUMER;
  add.u32 %r5, %r2, 1000; st.shared.u32 [%r4], %r5;
  {producer}
  bra OUT;
CONSUMER:
  {consumer}
  ld.shared.u32 %r5, [%r4]; ld.param.u64 %rd1, [dst]; mad.wide.u32 %rd1, %r2, 4, %rd1; st.global.u32 [%rd1], %r5;
OUT: ret; }}"""
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_named_barriers_between_roles(seed):
    y = np.zeros(32, np.uint32)
    emulator.run(two_roles("barrier.cta.arrive 3, 64;", "bar.sync 3, 64;"), "k", 1, 64, 0, [y], seed=seed)
    assert y.tolist() == list(range(1000, 1032))


def test_deadlock_says_who_waits_for_what():
    with pytest.raises(emulator.Deadlock, match=r"barrier 3 \(32 of 96 threads.*warp 1"):
        emulator.run(two_roles("", "bar.sync 3, 96;"), "k", 1, 64, 0, [np.zeros(32, np.uint32)])
    with pytest.raises(emulator.ProtocolError, match="expects 96"):
        emulator.run(two_roles("bar.arrive 3, 64;", "bar.sync 3, 96;"), "k", 1, 64, 0, [np.zeros(32, np.uint32)])


@pytest.mark.parametrize("seed", SEEDS)
def test_cp_async_needs_its_wait(seed):
    text = (
        HEAD.format(arch="sm_90a")
        + """
.visible .entry k(.param .u64 src, .param .u64 dst)
{ .reg .b32 %r<8>; .reg .b64 %rd<4>; .shared .align 16 .b8 buf[1024];
  mov.u32 %r1, %tid.x; mov.u32 %r2, buf; mad.lo.u32 %r3, %r1, 16, %r2;
  ld.param.u64 %rd1, [src]; mad.wide.u32 %rd1, %r1, 16, %rd1;
  mov.u32 %r7, 12;
  cp.async.cg.shared.global [%r3], [%rd1], 16, %r7;
  cp.async.commit_group;
  WAIT
  ld.shared.v4.u32 {%r4, %r5, %r6, %r7}, [%r3];
  ld.param.u64 %rd2, [dst]; mad.wide.u32 %rd2, %r1, 16, %rd2;
  st.global.v4.u32 [%rd2], {%r4, %r5, %r6, %r7};
  ret; }"""
    )
    x, y = np.arange(1, 257, dtype=np.uint32), np.zeros(256, np.uint32)
    want = x.reshape(-1, 4) * np.array([1, 1, 1, 0], np.uint32)
    emulator.run(text.replace("WAIT", "cp.async.wait_group 0;"), "k", 1, 64, 0, [x, y], seed=seed)
    assert (y.reshape(-1, 4) == want).all()  # 12 of 16 bytes read, the rest zero-filled
    if seed is None:
        emulator.run(text.replace("WAIT", "cp.async.wait_group 1;"), "k", 1, 64, 0, [x, y])
        assert (y == 0xFFFFFFFF).all()  # one group may still be in flight, and is: nobody wrote yet


def test_generic_addresses_atomics_and_local_memory():
    text = (
        HEAD.format(arch="sm_90a")
        + """
.visible .entry k(.param .u64 dst)
{ .reg .b32 %r<8>; .reg .b64 %rd<6>; .local .align 4 .b8 mine[8]; .shared .align 4 .u32 sum;
  mov.u32 %r1, %tid.x; cvt.u64.u32 %rd5, %r1;
  mov.u64 %rd1, mine; cvta.local.u64 %rd2, %rd1; st.u32 [%rd2+4], %r1; ld.local.u32 %r2, [%rd1+4];
  mov.u32 %r3, sum; st.shared.u32 [%r3], 0; bar.sync 0; atom.shared.add.u32 %r4, [%r3], %r2;
  bar.sync 0;
  mov.u64 %rd3, sum; cvta.shared.u64 %rd3, %rd3; ld.u32 %r5, [%rd3];
  ld.param.u64 %rd4, [dst]; mad.wide.u32 %rd4, %r1, 4, %rd4; st.global.u32 [%rd4], %r5;
  ret; }"""
    )
    y = np.zeros(64, np.uint32)
    emulator.run(text, "k", 1, 64, 0, [y])
    assert (y == 64 * 63 // 2).all()


def test_parameters_are_checked():
    with pytest.raises(emulator.EmulatorError, match="takes 2 parameters, 1"):
        emulator.run(REVERSE.replace("BARRIER", ""), "reverse", 1, 128, 512, [np.zeros(4, np.uint32)])
    with pytest.raises(emulator.EmulatorError, match="no kernel 'x'"):
        emulator.run(REVERSE, "x", 1, 128, 512, [])


def test_inner_braces_scope_registers_and_labels():
    x = np.arange(32, dtype=np.uint32)
    body = """{ .reg .b32 %q; mov.b32 %q, 5; bra DONE; mov.b32 %q, 6; DONE: add.u32 y0, x0, %q; }
              { .reg .b32 %q; mov.b32 %q, 7; bra DONE; mov.b32 %q, 8; DONE: add.u32 y0, y0, %q; }"""
    assert lanes(body, [x], [np.uint32]).tolist() == (x + 12).tolist()


LAUNCHED = (
    HEAD.format(arch="sm_90a")
    + """
.global .align 4 .u32 calls = 5;
.visible .entry k(.param .u64 dst, .param .u32 add)
{ .reg .b32 %r<12>; .reg .b64 %rd<4>; .reg .pred %p; .local .align 4 .b8 mine[4]; .shared .align 4 .u32 all;
  ld.param.u64 %rd1, [dst]; ld.param.u32 %r1, [add];
  mad.lo.u32 %r2, %ctaid.x, %ntid.x, %tid.x; mul.lo.u32 %r3, %nctaid.x, 1000; add.u32 %r3, %r3, %r1;
  mov.u64 %rd2, calls; ld.global.u32 %r4, [%rd2]; add.u32 %r3, %r3, %r4;
  ld.local.u32 %r5, [mine]; st.local.u32 [mine], 0; ld.shared.u32 %r6, [all]; bar.sync 0; st.shared.u32 [all], 0;
  and.b32 %r5, %r5, %r6; not.b32 %r5, %r5; and.b32 %r7, %r8, 0; add.u32 %r3, %r3, %r5;
  mad.wide.u32 %rd1, %r2, 4, %rd1; st.global.u32 [%rd1], %r3;
  setp.eq.u32 %p, %nctaid.x, 1; @%p st.global.u32 [%rd2], 77;
  ret; }"""
)


@pytest.mark.parametrize("seed", [None, 1])
def test_a_launch_inherits_nothing_from_the_one_before(seed):
    """One bound kernel serves them all: parameters, memory, grid, the CTA's index as a bare operand, and what was written
    to shared, local and module memory are each launch's own."""
    launch._bound.clear()
    for grid, add in ((2, 7), (3, 40), (1, 5), (70, 1), (300, 2), (1, 0)):
        y = np.zeros(grid * 64, np.uint32)
        emulator.run(LAUNCHED, "k", grid, 64, 0, [y, add], seed=seed)
        assert (y == 1000 * grid + add + 5).all(), grid
    machines = list(launch._bound.values())
    assert [m.batch for m in machines] == [128, 4]  # 70 and 300 CTAs, then 2, 3 and 1
    emulator.run(LAUNCHED.replace("1000", "2000"), "k", 1, 64, 0, [y, 0])
    assert (y == 2005).all() and len(launch._bound) == 3


def test_a_launch_that_failed_leaves_no_trace():
    launch._bound.clear()
    y = np.zeros(64, np.uint32)
    with pytest.raises(emulator.MemoryFault):
        emulator.run(LAUNCHED, "k", 2, 64, 0, [y, 1])
    emulator.run(LAUNCHED, "k", 1, 64, 0, [y, 1])
    assert (y == 1006).all() and len(launch._bound) == 1


def test_bound_kernels_give_way_to_later_ones(monkeypatch):
    launch._bound.clear()
    y = np.zeros(64, np.uint32)
    emulator.run(LAUNCHED, "k", 1, 64, 0, [y, 1])
    (first,) = launch._bound.values()
    monkeypatch.setattr(launch, "KEPT_BYTES", 2 * first.bytes)
    for n in range(3):
        emulator.run(LAUNCHED.replace("1000", str(n)), "k", 1, 64, 0, [y, 1])
    assert len(launch._bound) == 2 and first not in launch._bound.values()
