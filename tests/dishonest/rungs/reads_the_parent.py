"""Reads another rung's text and runs it as its own, so that no import shows it."""

from pathlib import Path

SOURCE = (Path(__file__).parents[1] / "001-honest" / "kernel.py").read_text()
exec(compile(SOURCE, __file__, "exec"))
