"""ladder.yaml: its schema, and what the runner asks of it (rungs, parents, folders, cells)."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import yaml
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

ROOT = Path(__file__).resolve().parent.parent
REGIMES = ("strong", "slow", "mixed", "init")
FORMS = ("prod", "pre")

Slug = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$")]
Arch = Literal["sm_90a", "sm_100a", "sm_103a", "cpu"]
Regime = Literal["strong", "slow", "mixed", "init"]
Form = Literal["prod", "pre"]
Size = Annotated[int, Field(ge=1, strict=True)]


class ManifestError(ValueError):
    """ladder.yaml is wrong, or asked for something it does not hold; the message names rung (or case), key, accepted."""


class CaseEntry(BaseModel):
    """Sizes of one problem (kernels/kda/cases.py) and the regimes and forms in which it is timed."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    B: Size
    T: Size
    H: Size
    HV: Size
    K: Size
    V: Size
    dtype: Literal["bfloat16", "float16"] = "bfloat16"
    initial_state: bool = False
    gpu: Annotated[bool, Field(strict=True)]
    regimes: tuple[Regime, ...] = REGIMES
    forms: tuple[Form, ...] = FORMS

    @model_validator(mode="before")
    @classmethod
    def _heads(cls, data: Any) -> Any:
        """HV defaults to H: one value head per q/k head."""
        return {"HV": data["H"], **data} if isinstance(data, dict) and "H" in data else data

    @model_validator(mode="after")
    def _consistent(self) -> CaseEntry:
        if self.HV % self.H:
            raise ValueError(f"HV: given {self.HV}, accepted: a multiple of H = {self.H}")
        for key in ("regimes", "forms"):
            values = getattr(self, key)
            if not values or len(set(values)) != len(values):
                raise ValueError(f"{key}: given {list(values)}, accepted: at least one, each once")
        return self


class Rung(BaseModel):
    """One rung: ideas/NNN-slug."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    number: Size
    slug: Slug
    parent: Size
    idea: Annotated[str, StringConstraints(min_length=1)]
    status: Literal["current", "won", "falsified", "draft"]
    reason: str | None = None
    archs: tuple[Arch, ...]
    replaces: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Folder name: 001-baseline."""
        return f"{self.number:03d}-{self.slug}"

    @model_validator(mode="after")
    def _consistent(self) -> Rung:
        if self.parent > self.number:
            raise ValueError(f"parent: given {self.parent}, accepted: this rung's number or a lower one")
        if self.status == "falsified" and not self.reason:
            raise ValueError("reason: missing, accepted: one line that says why the idea is falsified")
        if not self.archs or len(set(self.archs)) != len(self.archs):
            raise ValueError(f"archs: given {list(self.archs)}, accepted: at least one, each once")
        return self


class Cell(NamedTuple):
    """What is checked and timed as one; nothing is ever compared across cells. case: kernels.kda.cases.Case."""

    case: Any
    regime: str
    form: str

    @property
    def key(self) -> tuple[str, str, str]:
        return self.case.name, self.regime, self.form

    def __str__(self) -> str:
        return f"{self.case.name}/{self.regime}/{self.form}"


class Ladder:
    """A validated ladder.yaml. root: the folder that holds it and ideas/."""

    def __init__(self, root: Path, cases: dict[str, CaseEntry], rungs: list[Rung]) -> None:
        self.root = root
        self.cases = cases
        self.rungs = {rung.number: rung for rung in rungs}

    def rung(self, number: int) -> Rung:
        if number not in self.rungs:
            known = ", ".join(map(str, self.rungs)) or "none"
            raise ManifestError(f"rung {number}: not in ladder.yaml, accepted: {known}")
        return self.rungs[number]

    def numbers(self, given: Iterable[int] | None = None) -> list[int]:
        """What a command is about: the given rungs, else all but the falsified ones."""
        return list(given or ()) or [n for n, rung in self.rungs.items() if rung.status != "falsified"]

    def parent(self, rung: Rung) -> Rung:
        return self.rungs[rung.parent]

    def folder(self, rung: Rung) -> Path:
        return self.root / "ideas" / rung.name

    def cells(
        self, *, gpu: bool, cases: Iterable[str] = (), regimes: Iterable[str] = (), forms: Iterable[str] = (),
        every_regime: bool = False,
    ) -> list[Cell]:  # fmt: skip
        """Cells of the GPU cases (or of the small ones), filtered by name; every_regime: not only the listed ones.

        Raises ManifestError where a filter names something unknown or nothing is left.
        """
        from kernels.kda.cases import Case

        cases, regimes, forms = tuple(cases), tuple(regimes), tuple(forms)
        for key, given, known in (("cases", cases, self.cases), ("regimes", regimes, REGIMES), ("forms", forms, FORMS)):
            if unknown := [x for x in given if x not in known]:
                raise ManifestError(f"{key}: given {', '.join(unknown)}, accepted: {', '.join(known)}")
        out = []
        for name, entry in self.cases.items():
            if (name not in cases) if cases else (entry.gpu != gpu):
                continue
            case = Case(name=name, **entry.model_dump(exclude={"regimes", "forms"}))
            listed = REGIMES if every_regime or regimes else entry.regimes
            out += [Cell(case, r, f) for r in listed if not regimes or r in regimes
                    for f in entry.forms if not forms or f in forms]  # fmt: skip
        if not out:
            raise ManifestError(f"cases: no {'GPU' if gpu else 'small'} case of ladder.yaml is left by these filters")
        return out


def load(root: Path = ROOT) -> Ladder:
    """Read and validate root/ladder.yaml. Raises ManifestError with one line per fault."""
    path = Path(root) / "ladder.yaml"
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ManifestError(f"{path}: cannot be read: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise ManifestError(f"ladder.yaml: not valid YAML: {' '.join(str(error).split())}") from None
    return parse(data, Path(root))


def parse(data: Any, root: Path) -> Ladder:
    if not isinstance(data, dict) or set(data) != {"cases", "rungs"}:
        given = ", ".join(map(str, data)) if isinstance(data, dict) else type(data).__name__
        raise ManifestError(f"ladder.yaml: given keys {given}, accepted: cases, rungs")
    if not isinstance(data["cases"], dict) or not isinstance(data["rungs"], list):
        raise ManifestError("ladder.yaml: accepted: cases a mapping from name to sizes, rungs a list")
    faults: list[str] = []
    cases = {str(n): e for n, x in data["cases"].items() if (e := _entry(CaseEntry, f"case {n}", x, faults))}
    rungs = [e for i, x in enumerate(data["rungs"]) if (e := _entry(Rung, _rung_label(x, i), x, faults))]
    for rung in rungs:
        if sum(r.number == rung.number for r in rungs) > 1:
            faults.append(f"rung {rung.number}: number: taken twice, accepted: one entry per number")
        if sum(r.slug == rung.slug for r in rungs) > 1:
            faults.append(f"rung {rung.number}: slug: {rung.slug!r} taken twice, accepted: one entry per slug")
    if not faults:
        known = {r.number for r in rungs}
        faults += [f"rung {r.number}: parent: given {r.parent}, accepted: one of {sorted(known)}"
                   for r in rungs if r.parent not in known]  # fmt: skip
    if faults:
        raise ManifestError("\n".join(f"ladder.yaml: {fault}" for fault in dict.fromkeys(faults)))
    return Ladder(root, cases, rungs)


def _rung_label(entry: Any, index: int) -> str:
    number = entry.get("number") if isinstance(entry, dict) else None
    return f"rung {number}" if number is not None else f"rung entry {index + 1} in the list"


def _entry(model: type[BaseModel], label: str, data: Any, faults: list[str]) -> Any:
    """The validated entry, or None with its faults added in words: which entry, which key, given, accepted."""
    if not isinstance(data, dict):
        faults.append(f"{label}: given {data!r}, accepted: a mapping")
        return None
    try:
        return model.model_validate(data)
    except ValidationError as error:
        for e in error.errors():
            key = ".".join(str(x) for x in e["loc"])
            if e["type"] == "extra_forbidden":
                faults.append(f"{label}: {key}: unknown key, accepted: {', '.join(model.model_fields)}")
            elif e["type"] == "missing":
                faults.append(f"{label}: {key}: missing, accepted: {_accepted(model, key)}")
            elif e["type"] == "value_error":
                faults.append(f"{label}: {e['ctx']['error']}")
            else:
                faults.append(f"{label}: {key}: given {e['input']!r}, accepted: {_said(e)}")
        return None


def _said(error: dict[str, Any]) -> str:
    message = error["msg"]
    for prefix in ("Input should be ", "String should "):
        message = message.removeprefix(prefix)
    return message


def _accepted(model: type[BaseModel], key: str) -> str:
    annotation = model.model_fields[key].annotation
    return getattr(annotation, "__name__", None) or str(annotation).replace("typing.", "")
