import pytest

from ladder import diff
from ladder.diff import DiffError, listed_files, notes_mismatch, rung_diff
from ladder.scaffold import idea


@pytest.fixture
def child(repo):
    return idea(2, "try", root=repo)


def _notes(folder, *names):
    rows = "".join(f"| `{n}` | why |\n" for n in names)
    (folder / "NOTES.md").write_text(
        f"# x\n\n## What changed\n\n| file | change |\n|---|---|\n{rows}\n## Result\n\n| `no.py` | x |\n"
    )


def test_added_removed_changed_and_counts(repo, child):
    (child / "kernel.py").write_text((child / "kernel.py").read_text() + "EXTRA = 1\nMORE = 2\n")
    (child / "state_sm90.py").unlink()
    (child / "intra.py").write_text("a\nb\nc\n")
    (child / "table.bin").write_bytes(bytes(reversed(range(256))))
    found = {f.name: (f.kind, f.plus, f.minus) for f in rung_diff(3, root=repo).files}
    assert found == {
        "kernel.py": ("changed", 2, 0),
        "state_sm90.py": ("removed", 0, 1),
        "intra.py": ("added", 3, 0),
        "table.bin": ("changed", 0, 0),
    }
    text = diff.render(rung_diff(3, root=repo), unified=True)
    assert "4 files, +5 -1 lines" in text and "+EXTRA = 1" in text and "binary file table.bin changed" in text


def test_notes_records_and_caches_do_not_count(repo, child):
    (child / "NOTES.md").write_text("anything")
    (child / "records" / "bench-y.json").write_text("{}")
    (child / "__pycache__").mkdir()
    (child / "__pycache__" / "kernel.cpython-311.pyc").write_bytes(b"\x01")
    assert rung_diff(3, root=repo).files == ()


def test_only_the_own_name_is_masked(repo, child):
    (child / "kernel.py").write_text((child / "kernel.py").read_text().replace("001-baseline", "002-fused"))
    assert [f.name for f in rung_diff(3, root=repo).files] == ["kernel.py"]


def test_notes_agree(repo, child):
    (child / "state_sm90.py").write_text("WARPS = 8\n")
    _notes(child, "state_sm90.py")
    assert notes_mismatch(3, root=repo) == []


def test_notes_that_leave_a_file_out(repo, child):
    (child / "state_sm90.py").write_text("WARPS = 8\n")
    _notes(child)
    assert notes_mismatch(3, root=repo) == ["NOTES.md does not list `state_sm90.py`, which is changed"]


def test_notes_that_list_too_much(repo, child):
    _notes(child, "kernel.py", "kernel.py")
    wrong = notes_mismatch(3, root=repo)
    assert any("lists `kernel.py`, which does not differ" in w for w in wrong) and any("2 times" in w for w in wrong)


def test_notes_without_a_table_or_missing(repo, child):
    (child / "NOTES.md").write_text("# x\n\n## What changed\n\nnothing much\n")
    assert "no table" in notes_mismatch(3, root=repo)[0]
    (child / "NOTES.md").unlink()
    assert "is missing" in notes_mismatch(3, root=repo)[0]


def test_the_baseline_is_its_own_parent(repo):
    assert rung_diff(1, root=repo).files == () and notes_mismatch(1, root=repo) == []


def test_unknown_rung_and_missing_folder(repo):
    with pytest.raises(DiffError, match=r"^rung 8: not in ladder.yaml \(rungs there: 1, 2\)"):
        rung_diff(8, root=repo)
    (repo / "ideas" / "002-fused").rename(repo / "ideas" / "elsewhere")
    with pytest.raises(DiffError, match="folder ideas/002-fused is missing"):
        rung_diff(2, root=repo)


def test_listed_files_reads_the_first_column_only():
    notes = "## What changed\n\n| file | change |\n| :-- | --: |\n| `a.py`, `b.py` | uses `c.py` |\n"
    assert listed_files(notes) == ["a.py", "b.py"]
