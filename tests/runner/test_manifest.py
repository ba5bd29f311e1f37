"""ladder.yaml: every fault is named by rung (or case), key, and what is accepted."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest

from ladder import manifest

GOOD = {
    "cases": {
        "big": {"B": 1, "T": 2048, "H": 12, "K": 128, "V": 128, "gpu": True, "regimes": ["strong", "slow"]},
        "small": {"B": 1, "T": 64, "H": 1, "HV": 2, "K": 64, "V": 64, "gpu": False, "forms": ["pre"]},
    },
    "rungs": [
        {"number": 1, "slug": "base", "parent": 1, "idea": "start", "status": "current", "archs": ["sm_90a"]},
        {"number": 2, "slug": "next", "parent": 1, "idea": "go on", "status": "draft", "archs": ["sm_90a", "sm_100a"]},
    ],
}


def broken(path, value):
    data = copy.deepcopy(GOOD)
    *way, last = path
    node = data
    for key in way:
        node = node[key]
    if value is KeyError:
        del node[last]
    else:
        node[last] = value
    return data


def test_the_ladder_of_this_repository_is_valid():
    ladder = manifest.load()
    assert ladder.rung(1).name == "001-baseline" and ladder.parent(ladder.rung(1)).number == 1


def test_good_one_is_read():
    ladder = manifest.parse(GOOD, Path("."))
    assert ladder.rung(2).name == "002-next" and ladder.parent(ladder.rung(2)).number == 1
    assert ladder.cases["big"].HV == 12 and ladder.cases["small"].HV == 2


FAULTS = [
    (("rungs", 1, "status"), "winning", r"rung 2: status: given 'winning', accepted: 'current', 'won', 'falsified' or 'draft'"),
    (("rungs", 1, "archs"), ["sm_80"], r"rung 2: archs.0: given 'sm_80', accepted: 'sm_90a', 'sm_100a', 'sm_103a' or 'cpu'"),
    (("rungs", 1, "archs"), [], r"rung 2: archs: given \[\], accepted: at least one"),
    (("rungs", 1, "idea"), KeyError, r"rung 2: idea: missing"),
    (("rungs", 1, "speed"), 3, r"rung 2: speed: unknown key, accepted: number, slug, parent, idea"),
    (("rungs", 1, "parent"), 7, r"rung 2: parent: given 7, accepted: this rung's number or a lower one"),
    (("rungs", 0, "number"), 2, r"rung 2: number: taken twice"),
    (("rungs", 1, "slug"), "base", r"rung 1: slug: 'base' taken twice"),
    (("rungs", 1, "slug"), "Bad Name", r"rung 2: slug: given 'Bad Name', accepted: match pattern"),
    (("rungs", 1, "number"), "two", r"rung two: number: given 'two', accepted: a valid integer"),
    (("rungs", 1, "status"), "falsified", r"rung 2: reason: missing, accepted: one line"),
    (("rungs", 1), "next", r"rung entry 2 in the list: given 'next', accepted: a mapping"),
    (("cases", "big", "K"), 0, r"case big: K: given 0, accepted: greater than or equal to 1"),
    (("cases", "big", "K"), KeyError, r"case big: K: missing, accepted: int"),
    (("cases", "big", "HV"), 13, r"case big: HV: given 13, accepted: a multiple of H = 12"),
    (("cases", "big", "regimes"), ["fast"], r"case big: regimes.0: given 'fast', accepted: 'strong', 'slow', 'mixed' or 'init'"),
    (("cases", "big", "regimes"), ["slow", "slow"], r"case big: regimes: given \['slow', 'slow'\], accepted: at least one, each once"),
    (("cases", "small", "dtype"), "fp32", r"case small: dtype: given 'fp32', accepted: 'bfloat16' or 'float16'"),
    (("cases", "small", "gpu"), KeyError, r"case small: gpu: missing, accepted: bool"),
    (("extra",), 1, r"given keys cases, rungs, extra, accepted: cases, rungs"),
    (("rungs",), {}, r"rungs a list"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "value", "message"), FAULTS)
def test_fault_is_named(path, value, message):
    with pytest.raises(manifest.ManifestError, match=message):
        manifest.parse(broken(path, value), Path("."))


def test_every_fault_is_told_at_once():
    data = broken(("rungs", 1, "status"), "x")
    data["cases"]["big"]["K"] = -1
    with pytest.raises(manifest.ManifestError) as error:
        manifest.parse(data, Path("."))
    assert len(str(error.value).splitlines()) == 2


def test_cells_and_filters():
    ladder = manifest.parse(GOOD, Path("."))
    names = lambda cells: [str(c) for c in cells]  # noqa: E731
    assert names(ladder.cells(gpu=True)) == ["big/strong/prod", "big/strong/pre", "big/slow/prod", "big/slow/pre"]
    assert names(ladder.cells(gpu=True, every_regime=True, forms=["pre"])) == [f"big/{r}/pre" for r in manifest.REGIMES]
    assert names(ladder.cells(gpu=False)) == [f"small/{r}/pre" for r in manifest.REGIMES]
    assert names(ladder.cells(gpu=False, cases=["big"], regimes=["init"], forms=["prod"])) == ["big/init/prod"]
    assert ladder.cells(gpu=False)[0].case.HV == 2
    with pytest.raises(manifest.ManifestError, match="regimes: given weak, accepted: strong, slow, mixed, init"):
        ladder.cells(gpu=True, regimes=["weak"])
    with pytest.raises(manifest.ManifestError, match="cases: given huge, accepted: big, small"):
        ladder.cells(gpu=True, cases=["huge"])
    with pytest.raises(manifest.ManifestError, match="no small case"):
        ladder.cells(gpu=False, forms=["prod"])


def test_unknown_rung_names_the_known_ones():
    with pytest.raises(manifest.ManifestError, match="rung 9: not in ladder.yaml, accepted: 1, 2"):
        manifest.parse(GOOD, Path(".")).rung(9)


@pytest.mark.parametrize(("text", "message"), [(None, "cannot be read: No such file"), ("a: [", "not valid YAML"), ("", "given keys NoneType")])
def test_unreadable_file_is_one_line(tmp_path, text, message):
    if text is not None:
        (tmp_path / "ladder.yaml").write_text(text)
    with pytest.raises(manifest.ManifestError, match=message) as error:
        manifest.load(tmp_path)
    assert "\n" not in str(error.value)
