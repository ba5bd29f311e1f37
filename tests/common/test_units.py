"""Compiled units: built once, kept on disk whole or not at all, never mixed up between copies."""

import json
import multiprocessing
import shutil

import pytest

from _common import cute
from _common.resources import resources

SOURCE = '''
import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream


@cute.kernel
def scale_kernel(a: cute.Tensor, b: cute.Tensor, s: cutlass.Float32):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    i = block * 128 + thread
    if i < cute.size(a):
        b[i] = a[i] * s


@cute.jit
def scale(a: cute.Tensor, b: cute.Tensor, s: cutlass.Float32, stream):
    scale_kernel(a, b, s).launch(grid=((cute.size(a) + 127) // 128, 1, 1), block=(128, 1, 1), stream=stream)


def build(arch, align=16):
    with open(__file__ + ".builds", "a") as file:
        file.write(arch + " ")
    n = cute.sym_int()
    a, b = (make_fake_compact_tensor(cutlass.Float32, (n,), assumed_align=align) for _ in range(2))
    return scale, (a, b, cutlass.Float32(1.0), make_fake_stream(use_tvm_ffi_env_stream=True))
'''


@pytest.fixture
def unit(tmp_path, monkeypatch):
    monkeypatch.setattr(cute, "BUILD", tmp_path / "build")
    source = tmp_path / "rung" / "device.py"
    source.parent.mkdir()
    source.write_text(SOURCE)
    return cute.Unit("scale", source, "sm_90a")


def test_compiles_without_a_gpu_for_each_architecture(unit):
    for arch in ("sm_90a", "sm_100a", "sm_103a"):
        artifact = cute.compile_unit(cute.Unit("scale", unit.source, arch))
        assert f".target {arch}" in artifact.ptx.read_text()
        (row,) = resources(artifact.cubin)
        assert "scale_kernel" in row.kernel and row.registers > 0 and row.spilled == 0
        assert callable(cute.load_compiled(cute.Unit("scale", unit.source, arch)))


def test_compiled_once(unit, monkeypatch):
    first = cute.compile_unit(unit)
    monkeypatch.setattr(cute, "_compile", lambda *a: pytest.fail("compiled again"))
    assert cute.compile_unit(unit) == first


@pytest.mark.parametrize("damage", ["truncate", "remove", "garble"])
def test_a_damaged_folder_is_rebuilt(unit, damage):
    artifact = cute.compile_unit(unit)
    whole = artifact.so.read_bytes()
    if damage == "truncate":
        artifact.so.write_bytes(whole[: len(whole) // 2])
    elif damage == "remove":
        artifact.ptx.unlink()
    else:
        (artifact.folder / "meta.json").write_text("{")
    again = cute.compile_unit(unit)
    assert again.folder == artifact.folder and again.so.stat().st_size == len(whole) and again.ptx.is_file()


def test_copies_edits_and_parameters_never_share_an_object(unit, tmp_path):
    copy = tmp_path / "copy" / "device.py"
    shutil.copytree(unit.source.parent, copy.parent)
    copy.write_text(SOURCE.replace("a[i] * s", "a[i] + s"))
    keys = {unit.key, cute.Unit("scale", copy, "sm_90a").key, cute.Unit("scale", unit.source, "sm_100a").key,
            cute.Unit("scale", unit.source, "sm_90a", (("align", 4),)).key}  # fmt: skip
    assert len(keys) == 4


def _build(unit, build_dir, results):
    cute.BUILD = build_dir
    results.put(str(cute.compile_unit(unit).folder))


def test_two_processes_at_once(unit):
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    workers = [context.Process(target=_build, args=(unit, cute.BUILD, results)) for _ in range(2)]
    for worker in workers:
        worker.start()
    folders = {results.get(timeout=120) for _ in workers}
    for worker in workers:
        worker.join()
    assert len(folders) == 1 and [w.exitcode for w in workers] == [0, 0]
    assert (unit.source.parent / "device.py.builds").read_text() == "sm_90a "  # the second waited for the first
    assert not list(cute.BUILD.glob(".scale-*"))


def test_without_the_dsl_the_recorded_toolchain_finds_what_was_compiled_elsewhere(unit, monkeypatch):
    artifact = cute.compile_unit(unit)

    def missing(name):
        raise cute.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(cute.importlib.metadata, "version", missing)
    assert cute.compile_unit(unit).folder == artifact.folder
    (cute.BUILD / "toolchain.json").unlink()
    with pytest.raises(cute.CompileError, match="not installed"):
        cute.compile_unit(unit)


def test_meta_names_the_unit_and_its_toolchain(unit):
    meta = json.loads((cute.compile_unit(unit).folder / "meta.json").read_text())
    assert meta["unit"] == "scale" and meta["arch"] == "sm_90a" and meta["toolchain"] == cute.toolchain()
