# Every target sets up .venv first if need be. PYTHON: the interpreter to make it from (3.11 or 3.12).
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3)
BIN := .venv/bin
LADDER := $(BIN)/python -m ladder

.PHONY: setup ladder rung test test-slow report idea verify best clean

setup: .venv/.ready

# A GPU box gets PyPI's CUDA build of torch and the rivals; elsewhere a CPU build is preferred where pip can find one.
.venv/.ready: pyproject.toml
	$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if v in ((3, 11), (3, 12)) else f"PYTHON: given {v[0]}.{v[1]}, accepted: 3.11 or 3.12")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	if command -v nvidia-smi >/dev/null; then $(BIN)/pip install --quiet -e '.[test,rivals]'; \
	else $(BIN)/pip install --quiet torch==2.13.0+cpu triton==3.9.0 || $(BIN)/pip install --quiet torch==2.13.0; \
	     $(BIN)/pip install --quiet -e '.[test]'; fi
	touch $@

# Compile every rung for every architecture it claims, execute and check it, and show the report.
ladder: setup
	$(LADDER) climb

# One rung: check it, and on a GPU bench it against its parent.  make rung N=4
rung: setup
	$(LADDER) rung $(N)

report: setup
	$(LADDER) report

# Which rung is best in each cell, against which rival.
best: setup
	$(LADDER) best

# Start an idea from a rung.  make idea FROM=4 NAME=my-idea
idea: setup
	$(LADDER) idea $(FROM) $(NAME)

# Static proofs of a rung's sm_100a kernel.  make verify N=4
verify: setup
	$(LADDER) verify $(N)

# A process a core. Not in pytest's own options: tests on a GPU share it, and a bundle's pytest has no xdist.
test: setup
	$(BIN)/python -m pytest -n logical --maxprocesses 4 --dist worksteal

test-slow: setup
	$(BIN)/python -m pytest -m slow

clean:
	rm -rf .build .pytest_cache report.html
