"""The race watcher: silent on correct programs under several schedules, and right about what is missing otherwise."""

import numpy as np
import pytest

import emulator
from emulator.cute_host import EmulatedTarget
from emulator.races import Races
from test_async import WANT, bulk, ring
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
