"""The public call on the emulator, over the ladder as it is: which kernels ran, in a process of its own. Prints one JSON line."""

import json
import logging
import sys
import warnings

import torch


def main(arch: str) -> None:
    warnings.simplefilter("ignore")
    from ladder.worker import emulate

    device = emulate(arch)
    from kernels.kda import inputs
    from kernels.kda.cases import Case
    from ladder import chunk_kda, loader, manifest

    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("kda_ladder").addHandler(handler)
    logging.getLogger("kda_ladder").setLevel(logging.INFO)
    call = inputs.make(Case("one-chunk", 1, 64, 1, 1, 64, 64), "slow", "prod", 5).call()

    def kernels(run):
        before = len(device.stats)
        with torch.no_grad():
            out = run()
        return out, [launch["kernel"] for launch in device.stats[before:]]

    (o, state), ours = kernels(lambda: chunk_kda(**call))
    number = int(said[0].split("rung ")[1][:3])
    ladder = manifest.load()
    direct, same = kernels(lambda: loader.load(ladder.folder(ladder.rung(number))).chunk_kda(**call))
    (fla_o, fla_state), flas = kernels(lambda: chunk_kda(**call, disable_recompute=True))
    errors = []
    for _ in range(2):  # said once all the same
        try:
            chunk_kda(**call, chunk_size=48)
        except ValueError as e:
            errors.append(str(e))
    try:
        chunk_kda(**call, chunk_dize=32)
    except NotImplementedError as e:
        errors.append(str(e))
    graph = chunk_kda(**(call | {"v": call["v"].clone().requires_grad_()}))[0].grad_fn
    print(json.dumps({
        "said": said, "ours": ours, "same_kernels": ours == same, "fla": flas, "errors": errors, "backward": graph is not None,
        "equal": torch.equal(o, direct[0]) and torch.equal(state, direct[1]),
        "apart": [(a.float() - b.float()).norm().item() / b.float().norm().item()
                  for a, b in ((o, fla_o), (state, fla_state))]}))  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1])
