"""SentryWard's verdict on the Blackwell PTX of 006, and of 009 launched without helpers: in every schedule barriers match and end,
and no two conflicting accesses of global, shared or tensor memory are unordered. K = V = 64, form `pre`, one chunk. With a helper
it decides nothing: it does not know bulk copies without a tensor map, nor a loop that ends when memory says so."""

import struct
from pathlib import Path

import pytest
import torch

from emulator.cute_host import EmulatedTarget
from emulator.launch import decode
from ladder import loader, verify
from ladder.verify_input import SCHEMA, Launch, Shape, _reads, _Recorder, _tensor_map

IDEAS = Path(__file__).resolve().parents[2] / "ideas"
K = T = 64


def recorded(name: str) -> Launch:
    """The launch that the unit's host function makes, as SentryWard reads it."""
    rung = loader.load(IDEAS / name).module
    unit = rung.unit("sm_100a", **rung.unit_params(K, K, "bfloat16", "log", True, False, True))
    rows = {name: torch.empty(1, T, 1, K, dtype=torch.bfloat16) for name in ("q", "k", "v", "o")}
    tensors = rows | {"g": torch.empty(1, T, 1, K), "beta": torch.empty(1, T, 1)}
    tensors |= {name: torch.empty(1, 1, K, K) for name in ("h0", "ht")}
    recorder, x = _Recorder(unit.arch), tensors
    order = [x["q"], x["k"], x["v"], x["g"], x["beta"], None, None, x["h0"], x["o"], x["ht"]]
    if name == "009-helpers":
        order += [torch.empty(1, rung.shipment(K), dtype=torch.uint8), torch.zeros(1, dtype=torch.int32), 0, 2, 0]
        tensors |= {"shipped": order[10], "arrived": order[11]}
    EmulatedTarget(unit.arch, device=recorder).load(unit)(*order, K**-0.5, 0.0)
    ((ptx, kernel, grid, block, smem, params, cluster),) = recorder.launches
    names = {tensor.data_ptr(): name for name, tensor in tensors.items()}
    maps, arguments, pointers = [], [], []
    for index, p in enumerate(decode(ptx).kernels[kernel].params):
        raw = params[p.offset : p.offset + p.size]
        if p.size == 128:
            maps.append(_tensor_map(index, raw, names))
        elif p.type == "f32":
            value = struct.unpack("<f", raw)[0]
            arguments.append({"parameter": index, "offset": 0, "type": "f32", "value": value})
        else:
            for offset, width in _reads(ptx, p.name):
                value = int.from_bytes(raw[offset : offset + width], "little")
                where = {"parameter": index, "offset": offset}
                if width == 8 and value in names:
                    pointers.append(where | {"type": "pointer", "space": "global", "object": names[value]})
                else:
                    arguments.append(where | {"type": f"u{8 * width}", "value": value})
    shape = {"grid_dim": list(grid), "block_dim": list(block), "cluster_dim": list(cluster), "dynamic_shared_bytes": smem}
    content = {"schema": SCHEMA, "declarations": pointers, "arguments": arguments, "tma_descriptors": maps, "launch": shape}
    return Launch(ptx, Shape(T, K=K, V=K), content, -1)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["006-one-kernel", "009-helpers"])
def test_no_schedule_has_a_race_or_hangs(name):
    pytest.importorskip("sentryward")
    rows = list(verify.races(recorded(name)))
    assert [outcome for name, outcome, *_ in rows if "warnings" not in name] == [verify.PASSED] * 2, rows
