"""bench of one rung in a folder, timed by the host: what the tests kill. Arguments: root, folder for the record."""

import sys
from pathlib import Path

from ladder import bench, manifest
from tests.runner.test_bench import HostTimer

root, out = map(Path, sys.argv[1:])
run = bench.Run(manifest.load(root), [1], bench.Options(seed=3, seconds=0.1, records_dir=out), HostTimer(), gpu_cases=False)
run.execute()
print("complete")
