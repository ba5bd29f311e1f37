"""What `build` read of a rung is kept for as long as nothing changes that decides it."""

from types import SimpleNamespace

import pytest

from _common import cute
from ladder import build, manifest

RUNG = """
STAGES, UNITS = (), ()
def unsupported(problem): return "nothing is supported"
def chunk_kda(**call): raise RuntimeError
"""


@pytest.fixture
def compiled(tmp_path, monkeypatch):
    monkeypatch.setattr(cute, "BUILD", tmp_path / ".build")
    folder = tmp_path / "ideas" / "009-none"
    folder.mkdir(parents=True)
    (folder / "kernel.py").write_text(RUNG)
    ladder = SimpleNamespace(cells=manifest.load().cells, folder=lambda rung: folder)
    rung = SimpleNamespace(number=9, name=folder.name)

    def run(text=None):
        if text is not None:
            (folder / "kernel.py").write_text(text)
        build._code.cache_clear()
        ((seat, rows),) = build.compiled(ladder, [(rung, "sm_90a")])
        return rows

    run.started = []
    submit = build.ProcessPoolExecutor.submit
    monkeypatch.setattr(build.ProcessPoolExecutor, "submit",
                        lambda self, *a: run.started.append(1) or submit(self, *a))  # fmt: skip
    return run


def test_rows_are_kept_until_the_code_changes(compiled, monkeypatch):
    assert compiled() == [] and len(compiled.started) == 1
    assert compiled() == [] and len(compiled.started) == 1
    compiled(RUNG + "# changed\n")
    assert len(compiled.started) == 2
    compiled(RUNG)
    assert len(compiled.started) == 2
    monkeypatch.setattr(build.importlib.metadata, "version", lambda name: "0")  # another toolchain
    compiled()
    assert len(compiled.started) == 3


def test_a_rung_that_does_not_compile_is_tried_again(compiled):
    for n in (1, 2):
        (row,) = compiled("raise ValueError('broken')")
        assert "broken" in row["error"] and len(compiled.started) == n
