"""CuTe's own tables (cute_oracle.py), computed once per version of the DSL and of the script, then kept in pytest's
cache."""

import hashlib
import importlib.metadata
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

SCRIPT = pathlib.Path(__file__).with_name("cute_oracle.py")


def _tables(config, arch):
    key = hashlib.sha256(SCRIPT.read_bytes() + importlib.metadata.version("nvidia-cutlass-dsl").encode()).hexdigest()[
        :16
    ]
    path = config.cache.mkdir("cute_oracle") / f"{arch}-{key}.npz"
    if not path.exists():
        part = path.with_suffix(f".{os.getpid()}.npz")
        env = dict(os.environ, CUTE_DSL_ARCH=arch, OMP_NUM_THREADS="1", PYTHONWARNINGS="ignore")
        subprocess.run([sys.executable, SCRIPT, arch, part], env=env, check=True, timeout=500)
        os.replace(part, path)
    with np.load(path) as tables:
        return dict(tables)


@pytest.fixture(scope="session")
def cute90(request):
    return _tables(request.config, "sm_90a")


@pytest.fixture(scope="session")
def cute100(request):
    return _tables(request.config, "sm_100a")
