"""Rivals known from another run, scaled to this one by fla."""

from __future__ import annotations

import pytest

from kernels.kda import field
from ladder import manifest

CASES = ("t2048_h12", "t8192_h24", "h64", "h96", "b8_h16_t4096", "t32768_h32")


def test_the_run_that_was_measured_gives_back_what_was_measured():
    assert field.scaled("h96", "slow", "prod", 2.698) == {"FlashKDA": 1.526, "cuLA": 1.803}


def test_a_run_in_which_fla_takes_half_the_time_halves_them():
    assert field.scaled("t2048_h12", "strong", "prod", 0.697) == pytest.approx({"FlashKDA": 0.162, "cuLA": 0.3145})


def test_nothing_is_claimed_of_other_cells():
    assert field.scaled("h96", "mixed", "prod", 2.7) == {} == field.scaled("train", "slow", "prod", 2.7)
    assert field.scaled("h96", "slow", "pre", 2.7) == {} == field.scaled("h96", "slow", "prod", None)


def test_every_cell_of_the_bar_is_known():
    assert set(field.EAGER_MS) == {(case, regime) for case in CASES for regime in ("strong", "slow")}
    assert {case for case, _ in field.EAGER_MS} <= set(manifest.load().cases)
