"""Ladders of plain-torch rungs, and one hostile case of a real rung in the emulator."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runner.conftest import Forge


@pytest.fixture
def forge(tmp_path: Path) -> Forge:
    return Forge(tmp_path)
