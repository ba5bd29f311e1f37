"""A rung's hash covers every file its kernels are made of, and nothing else."""

import pytest

from _common.codehash import code_hash, sources


@pytest.fixture
def project(tmp_path):
    files = {
        "kernels/__init__.py": "", "kernels/kda/__init__.py": "", "kernels/kda/contract.py": "X = 1\n",
        "kernels/kda/rivals.py": "", "_common/__init__.py": "", "_common/cute.py": "from _common import hashes\n",
        "_common/hashes.py": "import os\n", "ladder/report.py": "import kernels.kda.contract\n",
        "ideas/001-a/kernel.py": "from kernels.kda.contract import X\nfrom . import device\nfrom .extra.more import y\nimport json\n",
        "ideas/001-a/device.py": "def f():\n    import _common.cute\n", "ideas/001-a/extra/more.py": "y = 1\n",
        "ideas/001-a/NOTES.md": "notes", "ideas/002-b/kernel.py": "",
    }  # fmt: skip
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def digest(root, parent="p", timing="1"):
    return code_hash(root / "ideas/001-a", parent, timing, root=root)


def test_closure(project):
    names = {str(p.relative_to(project)) for p in sources((project / "ideas/001-a").glob("*.py"), project)}
    assert names == {
        "ideas/001-a/kernel.py", "ideas/001-a/device.py", "ideas/001-a/extra/more.py", "kernels/__init__.py",
        "kernels/kda/__init__.py", "kernels/kda/contract.py", "_common/__init__.py", "_common/cute.py", "_common/hashes.py",
    }  # fmt: skip


COUNTS = ["ideas/001-a/kernel.py", "ideas/001-a/device.py", "ideas/001-a/extra/more.py", "kernels/kda/contract.py", "_common/hashes.py"]
DOES_NOT = ["ideas/001-a/NOTES.md", "ideas/002-b/kernel.py", "ladder/report.py", "kernels/kda/rivals.py"]


@pytest.mark.parametrize(("name", "changes"), [(n, True) for n in COUNTS] + [(n, False) for n in DOES_NOT])
def test_what_changes_the_hash(project, name, changes):
    before = digest(project)
    path = project / name
    path.write_text(path.read_text() + "\n# edited\n")
    assert (digest(project) != before) is changes


def test_parent_and_timing_version_count(project):
    assert len({digest(project), digest(project, parent="q"), digest(project, timing="2")}) == 3


def test_where_the_project_lies_does_not_count(project, tmp_path_factory):
    import shutil

    elsewhere = tmp_path_factory.mktemp("elsewhere") / "copy"
    shutil.copytree(project, elsewhere)
    assert digest(elsewhere) == digest(project)
