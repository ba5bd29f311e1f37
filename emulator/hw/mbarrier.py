"""The mbarrier object as pure state (PTX ISA, "Parallel Synchronization and Communication Instructions: mbarrier").

Sections: "Phase of the mbarrier object", "Tracking asynchronous operations by the mbarrier object" (tx-count,
expect-tx, complete-tx), mbarrier.init, .inval, .arrive, .arrive_drop, .test_wait/.try_wait, .pending_count. The state
is a 64-bit word in shared memory whose layout the manual leaves opaque; `MBarrier.pack` and `unpack` use a layout of
our own. The engine decides who waits and who is woken; here is only what an operation does to the object, and an error
for what the manual calls undefined.
"""

from __future__ import annotations

from dataclasses import dataclass

from .errors import HwError

__all__ = ["MBarrier", "MAX_COUNT", "MAX_TX", "pending_count"]

MAX_COUNT = (1 << 20) - 1  # largest arrival count
MAX_TX = (1 << 20) - 1  # tx-count lies in [-MAX_TX, MAX_TX]


@dataclass
class MBarrier:
    """Mutable mbarrier state.

    expected  arrivals expected in the next phase
    pending   arrivals still missing in the current phase
    tx        bytes (tx-count) still outstanding
    phase     how many phases have completed since init (in full, so that a report can say which; parity is phase & 1)
    A phase completes when pending and tx are both zero: phase goes up by one, pending becomes expected.
    """

    expected: int
    pending: int
    tx: int = 0
    phase: int = 0

    @classmethod
    def init(cls, count: int) -> "MBarrier":
        """mbarrier.init: phase 0, pending = expected = count, tx-count 0. Raises HwError unless 1 <= count < 2^20."""
        if not 1 <= count <= MAX_COUNT:
            raise HwError(f"mbarrier.init: count {count}, accepted 1 to {MAX_COUNT}")
        return cls(count, count)

    @property
    def parity(self) -> int:
        """Parity of the phase now incomplete."""
        return self.phase & 1

    def arrive(self, count: int = 1, *, no_complete: bool = False, drop: bool = False) -> int:
        """mbarrier.arrive[.noComplete] and arrive_drop: returns the opaque state of the phase before the arrive.

        Raises HwError when more arrive than are pending, or when .noComplete completes the phase.
        """
        state = self.state()
        if not 1 <= count <= MAX_COUNT:
            raise HwError(f"mbarrier.arrive: count {count}, accepted 1 to {MAX_COUNT}")
        if count > self.pending:
            raise HwError(
                f"mbarrier.arrive: {count} arrivals but only {self.pending} of {self.expected} are pending in "
                f"phase {self.phase}"
            )
        if no_complete and count == self.pending and self.tx == 0:
            raise HwError(f"mbarrier.arrive.noComplete: it would complete phase {self.phase}")
        if drop:
            if count > self.expected:
                raise HwError(f"mbarrier.arrive_drop: count {count} exceeds the expected {self.expected}")
            self.expected -= count
        self.pending -= count
        self._complete()
        return state

    def expect_tx(self, nbytes: int) -> None:
        """mbarrier.expect_tx: raises the tx-count. For arrive.expect_tx call this first, then arrive."""
        self._add_tx(nbytes, "expect_tx")

    def complete_tx(self, nbytes: int) -> bool:
        """complete-tx of a bulk copy or mbarrier.complete_tx: lowers the tx-count; True if this completed the phase."""
        before = self.phase
        self._add_tx(-nbytes, "complete_tx")
        return self.phase != before

    def inc_pending(self, count: int = 1) -> None:
        """The pending-count increment of cp.async.mbarrier.arrive without .noinc (its arrive-on follows later)."""
        if self.pending + count > MAX_COUNT:
            raise HwError(f"mbarrier: pending count {self.pending} + {count} exceeds {MAX_COUNT}")
        self.pending += count

    def _add_tx(self, delta: int, what: str) -> None:
        if abs(delta) > MAX_TX:
            raise HwError(f"mbarrier.{what}: {abs(delta)} bytes, accepted 0 to {MAX_TX}")
        tx = self.tx + delta
        if abs(tx) > MAX_TX:
            raise HwError(
                f"mbarrier.{what}: tx-count would become {tx} in phase {self.phase}, accepted -{MAX_TX} to {MAX_TX}"
            )
        self.tx = tx
        self._complete()

    def _complete(self) -> None:
        # A completed phase hands over at once; expected 0 (all participants dropped) must not loop through phases.
        if self.pending == 0 and self.tx == 0:
            self.phase += 1
            self.pending = self.expected

    def test_parity(self, parity: int) -> bool:
        """test_wait.parity / try_wait.parity: True when the phase with that parity has completed.

        That is the current incomplete phase or the one just before it: on a fresh barrier parity 1 passes, 0 waits.
        """
        if parity not in (0, 1):
            raise HwError(f"mbarrier.test_wait.parity: phaseParity {parity}, accepted 0 or 1")
        return self.parity != parity

    def test_state(self, state: int) -> bool:
        """test_wait / try_wait with an opaque state: True when the phase that `state` was taken in has completed.

        Raises HwError for a state that is neither of the current nor of the immediately preceding phase.
        """
        age = (self.phase - (state >> 20)) & ((1 << 44) - 1)
        if age > 1:
            raise HwError(
                f"mbarrier.test_wait: state of phase {state >> 20}, accepted phases {self.phase - 1} and {self.phase}"
            )
        return age == 1

    def state(self) -> int:
        """Opaque 64-bit state: bits 0-19 pending count, bits 20-63 phase number."""
        return self.pending | (self.phase & ((1 << 44) - 1)) << 20

    def missing(self) -> str:
        """What the current phase still waits for, for deadlock reports."""
        arrivals = f"{self.pending} of {self.expected} arrivals"
        return f"phase {self.phase} (parity {self.parity}): {arrivals} and {self.tx} bytes missing"

    def pack(self) -> int:
        """Our 64-bit memory image: expected (20 bits), pending (20), tx in two's complement (21), phase modulo 8 (3).

        Only for storing the object in emulated shared memory; the phase is cut to 3 bits, so unpack is not an inverse
        for long runs. The engine should keep MBarrier objects beside memory and use the image as a tombstone.
        """
        return self.expected | self.pending << 20 | (self.tx & 0x1FFFFF) << 40 | (self.phase & 7) << 61

    @classmethod
    def unpack(cls, word: int) -> "MBarrier":
        """Inverse of pack, phase modulo 8."""
        tx = (word >> 40) & 0x1FFFFF
        return cls(word & MAX_COUNT, (word >> 20) & MAX_COUNT, tx - (1 << 21) if tx >> 20 else tx, word >> 61)


def pending_count(state: int) -> int:
    """mbarrier.pending_count of an opaque state that MBarrier.arrive returned."""
    return state & MAX_COUNT
