import os
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import yaml

from ladder import diff, scaffold
from ladder.scaffold import ScaffoldError, append_rung, idea


def test_copies_to_the_next_number(repo):
    folder = idea(2, "try", root=repo)
    assert folder == repo / "ideas" / "003-try"
    files = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
    assert files == ["NOTES.md", "kernel.py", "records/.gitkeep", "state_sm90.py", "table.bin"]
    assert (folder / "table.bin").read_bytes() == bytes(range(256))


def test_own_name_is_replaced_and_no_other(repo):
    text = (idea(2, "try", root=repo) / "kernel.py").read_text()
    assert 'NAME = "003-try"' in text
    assert "Rung 003 replaces two stages; rung 3 of its parent 001-baseline" in text
    assert "002-fused-more" in text


def test_notes_are_the_template(repo):
    notes = (idea(2, "try", root=repo) / "NOTES.md").read_text()
    assert "old notes" not in notes and "Parent: `002-fused`" in notes
    for heading in ("What changed", "Why it should be faster", "Prediction", "Result", "What was learned"):
        assert f"## {heading}\n" in notes


def test_a_fresh_copy_differs_in_nothing_and_its_notes_agree(repo):
    idea(2, "try", root=repo)
    assert diff.rung_diff(3, root=repo).files == ()
    assert diff.notes_mismatch(3, root=repo) == []


def test_yaml_keeps_every_line_and_gains_an_entry(repo):
    before = (repo / "ladder.yaml").read_text()
    idea(2, "try", root=repo)
    after = (repo / "ladder.yaml").read_text()
    kept = iter(after.splitlines())
    assert all(line in kept for line in before.splitlines()), "a line was lost or moved"
    entry = yaml.safe_load(after)["rungs"][-1]
    assert entry == {
        "number": 3,
        "slug": "try",
        "parent": 2,
        "idea": "copy of 002-fused, not changed yet",
        "status": "draft",
        "archs": ["sm_90a", "sm_100a"],
        "replaces": ["scan", "output"],
    }


def test_reason_of_a_falsified_parent_is_not_inherited(repo):
    path = repo / "ladder.yaml"
    path.write_text(path.read_text().replace("status: won", "status: falsified\n    reason: slower"))
    idea(2, "try", root=repo)
    entry = yaml.safe_load(path.read_text())["rungs"][-1]
    assert "reason" not in entry and entry["status"] == "draft"


@pytest.mark.parametrize(
    "text",
    [
        "rungs:\n- {number: 1, slug: a, parent: 1}\n",
        "rungs:\n- {number: 1, slug: a, parent: 1}",
        "rungs:\n    - number: 1\n      idea: |\n        two\n        lines\n\n\ncases: {}\n",
        "rungs:\n  - number: 1\n    idea: a long\n      folded line\n  # end\ncases: {}\n",
        "rungs:\n  - number: 1\n    regimes:\n      - strong\n      - slow  # the hard one\ncases: {}\n",
    ],
)
def test_append_in_other_layouts(text):
    entry = {"number": 2, "slug": "b", "idea": "x: y # z", "archs": ["sm_90a"]}
    result = yaml.safe_load(append_rung(text, entry))
    before = yaml.safe_load(text)
    assert result["rungs"] == [*before["rungs"], entry]
    assert {k: v for k, v in result.items() if k != "rungs"} == {k: v for k, v in before.items() if k != "rungs"}


@pytest.mark.parametrize("text", ["rungs: []\n", "cases: {}\n", "rungs: [{number: 1}]\n", ""])
def test_append_refuses_what_it_cannot_extend(text):
    with pytest.raises(ScaffoldError, match="ladder.yaml"):
        append_rung(text, {"number": 2})


@pytest.mark.parametrize(
    "name", ["", "Try", "a b", "a--b", "-a", "a-", "../x", "a/b", "x" * 41, "a_b", "é", None, "a\n"]
)
def test_bad_names_are_refused(repo, snapshot, name):
    before = snapshot(repo)
    with pytest.raises(ScaffoldError, match="^name: "):
        idea(2, name, root=repo)
    assert snapshot(repo) == before


def test_taken_names_are_refused(repo, snapshot):
    (repo / "ideas" / "007-loose").mkdir()
    before = snapshot(repo)
    for name in ("fused", "baseline", "loose"):
        with pytest.raises(ScaffoldError, match="is taken by"):
            idea(2, name, root=repo)
    assert snapshot(repo) == before
    assert idea(2, "next", root=repo).name == "008-next", "a number with a folder is not used again"


def test_missing_parent_is_refused(repo, snapshot):
    before = snapshot(repo)
    with pytest.raises(ScaffoldError, match=r"^from: no rung 9 .*rungs there: 1, 2"):
        idea(9, "try", root=repo)
    assert snapshot(repo) == before


def test_broken_yaml_is_named(repo):
    (repo / "ladder.yaml").write_text("rungs: [")
    with pytest.raises(ScaffoldError, match="^ladder.yaml: not valid YAML"):
        idea(2, "try", root=repo)


def test_an_error_midway_leaves_nothing(repo, snapshot, monkeypatch):
    before = snapshot(repo)

    def broken(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", broken)
    with pytest.raises(KeyboardInterrupt):
        idea(2, "try", root=repo)
    assert snapshot(repo) == before


def test_interrupted_right_after_the_commit_keeps_the_rung(repo, monkeypatch):
    real = os.replace

    def interrupted(a, b):
        real(a, b)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        idea(2, "try", root=repo)
    assert diff.rung_diff(3, root=repo).files == ()
    assert not (repo / "ideas" / "003-try" / scaffold.MARKER).exists()


def test_a_leftover_edited_by_hand_is_kept(repo):
    folder = repo / "ideas" / "003-try"
    folder.mkdir()
    (folder / scaffold.MARKER).touch()
    os.utime(folder / scaffold.MARKER, ns=(10**18, 10**18))
    (folder / "kernel.py").write_text("my work")
    with pytest.raises(ScaffoldError, match="003-try.*edited since"):
        idea(2, "other", root=repo)
    assert (folder / "kernel.py").read_text() == "my work"


def test_two_at_once_take_two_numbers(repo):
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda n: idea(2, n, root=repo).name, ["a", "b", "c", "d"]))
    assert sorted(n[:3] for n in made) == ["003", "004", "005", "006"]
    assert len(diff.read_entries(repo)) == 6


def _die_at_line(repo, step: int) -> bool:
    """Run `idea` in a forked child that dies, without any clean-up, at its `step`-th line; True if it got that far."""
    pid = os.fork()
    if pid == 0:
        seen = 0

        def trace(frame, event, _):
            nonlocal seen
            if frame.f_code.co_name not in ("_make", "_build", "_copy", "copy2", "copyfile"):
                return None
            if event == "line":
                seen += 1
                if seen == step:
                    os._exit(9)
            return trace

        sys.settrace(trace)
        idea(2, "try", root=repo)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9


def _assert_whole(repo):
    """Every listed rung has its folder, and no unfinished or hidden folder is left."""
    entries = diff.read_entries(repo)
    names = {diff.folder_name(e["number"], e["slug"]) for e in entries}
    assert {p.name for p in (repo / "ideas").iterdir()} == names
    for entry in entries[2:]:
        folder = repo / "ideas" / diff.folder_name(entry["number"], entry["slug"])
        assert diff.rung_diff(entry["number"], root=repo).files == ()
        assert sorted(p.name for p in folder.iterdir()) == [
            "NOTES.md",
            "kernel.py",
            "records",
            "state_sm90.py",
            "table.bin",
        ]


def test_killed_anywhere_leaves_nothing_half_made(repo):
    """Die at every other line of the work; what the yaml lists is whole at once, and the next call cleans the rest."""
    import shutil

    step, deaths, outcomes = 1, 0, set()
    while True:
        copy = repo.parent / f"kill-{step}"
        shutil.copytree(repo, copy)
        died = _die_at_line(copy, step)
        listed = [e["slug"] for e in diff.read_entries(copy)]
        assert listed in (["baseline", "fused"], ["baseline", "fused", "try"])
        outcomes.add(len(listed))
        if "try" in listed:
            assert diff.rung_diff(3, root=copy).files == ()
        else:
            idea(2, "try", root=copy)
        idea(2, "after", root=copy)
        _assert_whole(copy)
        shutil.rmtree(copy)
        deaths += died
        if not died:
            break
        step += 2 if step % 9 else 1
    assert deaths > 20 and outcomes == {2, 3}
