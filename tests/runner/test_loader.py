"""Rungs are imported from folders that start with digits, each instance with modules of its own."""

from __future__ import annotations

import sys

import pytest

from ladder import loader

KERNEL = "STAGES = ()\nUNITS = ()\n\ndef unsupported(p):\n    return None\n\ndef chunk_kda():\n    return VALUE\n"


def rung(root, name, kernel, **siblings):
    folder = root / name
    folder.mkdir(parents=True)
    (folder / "kernel.py").write_text(kernel)
    for stem, text in siblings.items():
        (folder / f"{stem}.py").write_text(text)
    return folder


@pytest.mark.parametrize("line", ["from . import device_code\nVALUE = device_code.VALUE\n", "from device_code import VALUE\n",
                                  "import device_code\nVALUE = device_code.VALUE\n", "from .device_code import VALUE\n"])
def test_siblings_of_two_rungs_stay_apart(tmp_path, line):
    one = rung(tmp_path, "001-one", line + KERNEL, device_code="VALUE = 1\n")
    two = rung(tmp_path, "002-two", line + KERNEL, device_code="VALUE = 2\n")
    assert (loader.load(one).chunk_kda(), loader.load(two).chunk_kda()) == (1, 2)
    assert "device_code" not in sys.modules


def test_instances_share_nothing_and_each_is_imported_once(tmp_path):
    folder = rung(tmp_path, "001-one", "VALUE = []\n" + KERNEL)
    first, again, copy = loader.load(folder), loader.load(folder), loader.load(folder, 1)
    assert first is again and first.chunk_kda() is not copy.chunk_kda()


def test_folders_of_one_name_in_two_places_stay_apart(tmp_path):
    a = rung(tmp_path / "a", "001-one", "VALUE = 'a'\n" + KERNEL)
    b = rung(tmp_path / "b", "001-one", "VALUE = 'b'\n" + KERNEL)
    assert (loader.load(a).chunk_kda(), loader.load(b).chunk_kda()) == ("a", "b")


def test_a_module_of_the_same_name_elsewhere_is_left_alone(tmp_path, monkeypatch):
    other = object()
    monkeypatch.setitem(sys.modules, "device_code", other)
    one = rung(tmp_path, "001-one", "from device_code import VALUE\n" + KERNEL, device_code="VALUE = 1\n")
    assert loader.load(one).chunk_kda() == 1
    assert sys.modules["device_code"] is other


@pytest.mark.parametrize(("kernel", "message"), [
    ("import no_such_package\n", "001-one: kernel.py cannot be imported: ModuleNotFoundError: No module named 'no_such_package'"),
    ("STAGES = ()\n", "001-one: kernel.py does not export unsupported, chunk_kda, UNITS"),
    ("def (\n", "001-one: kernel.py cannot be imported: SyntaxError"),
])  # fmt: skip
def test_faulty_rungs_are_named(tmp_path, kernel, message):
    folder = rung(tmp_path, "001-one", kernel)
    with pytest.raises(loader.LoadError, match=message.replace("(", r"\(").replace(")", r"\)")):
        loader.load(folder)
    (folder / "kernel.py").write_text("VALUE = 7\n" + KERNEL)
    assert loader.load(folder).chunk_kda() == 7, "a mended rung loads in the same process"


def test_missing_kernel(tmp_path):
    (tmp_path / "001-none").mkdir()
    with pytest.raises(loader.LoadError, match="001-none: kernel.py is missing"):
        loader.load(tmp_path / "001-none")
