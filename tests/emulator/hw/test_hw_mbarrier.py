"""The phases of an mbarrier, step by step as the manual tells them, and the errors for what it calls undefined."""

import pytest

from emulator.hw import HwError
from emulator.hw.mbarrier import MAX_COUNT, MAX_TX, MBarrier, pending_count


def test_fresh_barrier_passes_parity_one_only():
    b = MBarrier.init(2)
    assert b.test_parity(1) and not b.test_parity(0)


def test_phase_completes_with_the_last_arrival():
    b = MBarrier.init(3)
    b.arrive()
    b.arrive()
    assert not b.test_parity(0) and b.pending == 1
    b.arrive()
    assert b.test_parity(0) and not b.test_parity(1) and b.pending == 3 and b.phase == 1
    for phase in range(2, 6):
        b.arrive(3)
        assert b.phase == phase and b.pending == 3 and b.test_parity(phase % 2 ^ 1) and not b.test_parity(phase % 2)


def test_tx_holds_the_phase():
    b = MBarrier.init(1)
    b.expect_tx(4096)
    b.arrive()
    assert b.pending == 0 and not b.test_parity(0)
    assert not b.complete_tx(4000) and not b.test_parity(0)
    assert b.complete_tx(96) and b.test_parity(0) and b.tx == 0 and b.pending == 1


def test_bytes_may_complete_before_they_are_expected():
    b = MBarrier.init(1)
    assert not b.complete_tx(128) and b.tx == -128 and b.phase == 0
    b.expect_tx(128)
    assert b.tx == 0 and b.phase == 0  # the arrival is still missing
    b.arrive()
    assert b.phase == 1


def test_states_of_two_phases():
    b = MBarrier.init(2)
    before = b.arrive()
    assert pending_count(before) == 2 and pending_count(b.state()) == 1 and not b.test_state(before)
    b.arrive()
    assert b.test_state(before) and not b.test_state(b.state())
    b.arrive(2)
    with pytest.raises(HwError, match="phase 0"):
        b.test_state(before)


def test_too_many_arrivals():
    b = MBarrier.init(2)
    with pytest.raises(HwError, match="only 2 of 2"):
        b.arrive(3)
    b.expect_tx(16)
    b.arrive(2)
    with pytest.raises(HwError, match="only 0 of 2 are pending in phase 0"):
        b.arrive()


def test_no_complete():
    b = MBarrier.init(2)
    b.arrive(no_complete=True)
    with pytest.raises(HwError, match="noComplete"):
        b.arrive(no_complete=True)


def test_drop_lowers_the_next_phase():
    b = MBarrier.init(3)
    b.arrive(drop=True)
    assert (b.expected, b.pending) == (2, 2)
    b.arrive(2)
    assert b.phase == 1 and b.pending == 2


def test_inc_pending():
    b = MBarrier.init(1)
    b.inc_pending()
    b.arrive()
    assert b.phase == 0
    b.arrive()
    assert b.phase == 1 and b.pending == 1


@pytest.mark.parametrize("count", [0, -1, MAX_COUNT + 1])
def test_counts(count):
    with pytest.raises(HwError, match="mbarrier.init"):
        MBarrier.init(count)


def test_tx_range():
    b = MBarrier.init(1)
    b.expect_tx(MAX_TX)
    with pytest.raises(HwError, match="tx-count would become"):
        b.expect_tx(1)
    with pytest.raises(HwError, match="accepted 0 to"):
        b.complete_tx(MAX_TX + 1)


def test_parity_argument():
    with pytest.raises(HwError, match="phaseParity 2"):
        MBarrier.init(1).test_parity(2)


def test_image_round_trip():
    for b in (MBarrier.init(1), MBarrier(MAX_COUNT, 7, -MAX_TX, 5), MBarrier(12, 12, MAX_TX, 2)):
        assert MBarrier.unpack(b.pack()) == b and 0 <= b.pack() < 1 << 64


def test_missing_names_what_is_waited_for():
    b = MBarrier.init(4)
    b.arrive()
    b.expect_tx(32)
    assert b.missing() == "phase 0 (parity 0): 3 of 4 arrivals and 32 bytes missing"
