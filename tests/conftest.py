"""One thread per process: the CPU time of a thread then tells what its code does, and processes do not crowd each other."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before anything imports torch
