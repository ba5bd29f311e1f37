"""Says in ladder.yaml that it replaces the scan, and launches fla's."""

from .honest import STAGES, UNITS, unsupported  # noqa: F401
from .honest import chunk_kda as honest

from kernels.kda.contract import Stage

STAGES = (Stage("state", ("chunk_gated_delta_rule_fwd_kernel_h_blockdim64",), STAGES[0].run),)
chunk_kda = honest
