"""The commands that the Makefile runs and the README names are ones that the command line takes."""

import re
import shlex
import subprocess
from pathlib import Path

import typer

from ladder.cli import app

PROJECT = Path(__file__).resolve().parents[2]
VARIABLES = {"rung": ["N=4"], "verify": ["N=4"], "idea": ["FROM=4", "NAME=my-idea"]}
PLACEHOLDERS = {"[RUNGS]": "4", "NNN": "4"}


def parsed(arguments: str) -> dict:
    """The subcommand's parameters. Raises a usage error for what `python -m ladder ARGUMENTS` would refuse."""
    name, *args = (PLACEHOLDERS.get(word, word) for word in shlex.split(arguments))
    return typer.main.get_command(app).commands[name].make_context(name, args).params


def made(target: str) -> str:
    """The arguments of the ladder command that `make target` would run."""
    printed = subprocess.run(["make", "-s", "-n", "-o", "setup", "-o", ".venv/.ready", target, *VARIABLES.get(target, [])],
                             cwd=PROJECT, capture_output=True, text=True, check=True).stdout  # fmt: skip
    (arguments,) = re.findall(r"-m ladder (.+)", printed)
    return arguments


def test_what_make_runs():
    targets = re.findall(r"^([a-z]+):.*\n\t\$\(LADDER\)", (PROJECT / "Makefile").read_text(), re.MULTILINE)
    assert set(VARIABLES) < set(targets) and all(parsed(made(target)) for target in targets)


def test_what_the_readme_names():
    commands = re.findall(r"python -m ladder ([^`#\n]+)", (PROJECT / "README.md").read_text())
    assert len(commands) > 5 and all(parsed(arguments) for arguments in commands)


def test_the_variables_arrive():
    assert parsed(made("idea")) | {"root": None} == {"frm": 4, "name": "my-idea", "root": None}
    assert parsed(made("rung"))["number"] == 4 and parsed(made("verify"))["numbers"] == [4]
