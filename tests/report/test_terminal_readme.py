import io
import os

import pytest
from rich.console import Console

from ladder import report_readme, report_terminal
from ladder.report_readme import ReadmeError, refreshed
from tests.report.synthetic import NOW

README = """# Title

Words before.

<!-- ladder:rungs -->
old table
<!-- /ladder:rungs -->

Words between | with a pipe.

<!-- ladder:rivals -->
<!-- /ladder:rivals -->
Words after.
"""


def printed(ladder, stale, **options):
    text = io.StringIO()
    report_terminal.show(ladder, Console(file=text, width=200), stale=stale, now=NOW, **options)
    return text.getvalue()


def test_terminal_shows_reasons_staleness_and_absence(made):
    ladder, _, _, stale = made(statuses=["current", "won", "falsified"], stale={2}, failing={3})
    text = printed(ladder, stale)
    assert "falsified: the extra barrier costs more" in " ".join(text.split())
    assert "stale 002: the code has changed since" in text
    assert "absent rival kernel-fun: needs sm_100" in text
    assert "row 63 of o changes when token 64 changes" in text
    row = next(line for line in text.splitlines() if line.startswith(" 002    h96"))
    assert "stale" in row and " win " not in row, "a stale row must not carry its old verdict"


def test_terminal_of_one_rung_only(made):
    ladder, _, _, stale = made(statuses=["current", "won"])
    cells = [line.split()[0] for line in printed(ladder, stale, rungs=[2]).splitlines() if " h96 " in line]
    assert cells and set(cells) == {"002"}


def test_terminal_of_nothing(made):
    ladder, _, _, stale = made(statuses=[])
    assert printed(ladder, stale) == "No rung in ladder.yaml.\n"
    ladder, _, _, stale = made(statuses=["draft"], unbenched={1})
    assert "No timing recorded yet" in printed(ladder, stale)


def test_readme_changes_only_between_markers(made):
    ladder, _, _, stale = made(statuses=["current", "won", "falsified"])
    text = refreshed(README, ladder, stale)
    kept = [line for line in README.splitlines() if line != "old table"]
    rest = iter(text.splitlines())
    assert all(line in rest for line in kept) and "old table" not in text
    assert "[002-rung-b](ideas/002-rung-b/NOTES.md)" in text and "(falsified: the extra barrier" in text
    assert "| h96 | **" in text and "(cudnn:kda_hopper_cuda)" in text
    assert refreshed(text, ladder, stale) == text, "a second refresh changes nothing"


def test_readme_tables_are_rectangular(made):
    ladder, _, _, stale = made(statuses=["current", "won", "falsified"], stale={1})
    for block in refreshed(README, ladder, stale).split("\n\n"):
        lines = [line for line in block.splitlines() if line.startswith("|")]
        assert len({line.replace("\\|", "").count("|") for line in lines}) <= 1


@pytest.mark.parametrize(
    "text, said",
    [
        ("<!-- ladder:rungs -->\n", "ladder:rungs must open and close"),
        ("<!-- /ladder:rungs -->\n<!-- ladder:rungs -->\n", "ladder:rungs must open and close"),
        ("<!-- ladder:rungs --> x <!-- /ladder:rungs -->\n", "ladder:rungs must open and close"),
        ("<!-- ladder:best -->\n<!-- /ladder:best -->\n", "marker ladder:best; accepted: rungs, rivals"),
    ],
)
def test_readme_with_wrong_markers_is_refused(made, text, said):
    ladder, _, _, stale = made(statuses=["current", "won", "falsified"])
    with pytest.raises(ReadmeError, match=said):
        refreshed(text, ladder, stale)


def test_readme_is_replaced_in_one_step(made, tmp_path, monkeypatch):
    ladder, _, _, _ = made(statuses=["current", "won", "falsified"])
    path = tmp_path / "README.md"
    path.write_text(README)
    os.chmod(path, 0o640)

    def broken(*_):
        raise OSError("disk full")

    with monkeypatch.context() as m:
        m.setattr(os, "replace", broken)
        with pytest.raises(OSError):
            report_readme.write(path, ladder)
    assert path.read_text() == README and [p.name for p in tmp_path.iterdir()] == ["README.md"]
    assert report_readme.write(path, ladder) is True
    assert report_readme.write(path, ladder) is False
    assert path.stat().st_mode & 0o777 == 0o640
