"""What is read from a cubin, seen on small PTX programs that ptxas compiles here."""

import subprocess

import pytest
import triton

from _common import cute
from _common.resources import wgmma_faults, resources
from ladder import build

HEAD = ".version 8.0\n.target sm_90a\n.address_size 64\n"
PRODUCT = "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f0, %f1, %f2, %f3}, %a, %a, 0, 1, 1, 0, 0;\n"
HALF = f"wgmma.fence.sync.aligned;\n{PRODUCT}wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;\n"
READ = "mul.f32 %x{n}, %s, %f0;\n"


def assembled(body, *options, parameters=".param .u64 out, .param .u64 descriptor, .param .f32 s, .param .u32 n"):
    ptx = HEAD + f".visible .entry halves({parameters})\n{{\n{body}\nret;\n}}\n"
    command = [triton.knobs.nvidia.ptxas.path, "-arch=sm_90a", *options, "-o", "/dev/stdout", "/dev/stdin"]
    return ptx, subprocess.run(command, input=ptx.encode(), check=True, capture_output=True).stdout


def halves(second, loop=False):
    """Two products one after the other, both scaled and stored. second: the text of the other one."""
    body = HALF + READ.format(n=0) + second
    if loop:
        body = f"LOOP:\n{body}sub.u32 %n, %n, 1; setp.ne.u32 %more, %n, 0;\n"
    return f""".reg .f32 %f<8>, %x<2>, %s; .reg .b64 %out, %a, %b; .reg .b32 %n; .reg .pred %more;
ld.param.u64 %out, [out]; ld.param.u64 %a, [descriptor]; ld.param.f32 %s, [s]; ld.param.u32 %n, [n]; add.s64 %b, %a, 2;
{body}st.global.v2.f32 [%out], {{%x0, %x1}};
{"add.s64 %out, %out, 4096; @%more bra LOOP;" if loop else ""}"""


SAME = HALF.replace("%a, 0", "%b, 0") + READ.format(n=1)  # of other operands, in the registers of the first
OTHER = SAME.replace("%f0, %f1, %f2, %f3", "%f4, %f5, %f6, %f7").replace("%f0;", "%f4;")


@pytest.mark.parametrize("loop", [False, True])
def test_ptxas_drops_products_of_the_same_registers(loop):
    """Of a loop it drops them too, and unrolls it: more products are left then than the PTX has."""
    (line,) = wgmma_faults(*assembled(halves(SAME, loop)))
    assert line == ("ptxas dropped 8 of 16 wgmma of halves" if loop else "ptxas dropped 1 of 2 wgmma of halves")


@pytest.mark.parametrize("loop", [False, True])
def test_products_that_are_all_there(loop):
    assert wgmma_faults(*assembled(halves(OTHER, loop))) == []


def test_products_one_at_a_time():
    """A result that is read while the next product is in flight."""
    early = OTHER.replace("wgmma.fence.sync.aligned;\n", "")
    group = HALF.split("wgmma.commit")[0] + READ.format(n=0) + early
    (line,) = wgmma_faults(*assembled(halves(early).replace(HALF + READ.format(n=0) + early, group)))
    assert line == "ptxas serialised the wgmma of halves: 2 fences for 2 products, 1 for 2 in the PTX"


def test_what_is_spilled_counts():
    """Forty values alive at once, in registers or, with at most 24 of these, on the stack."""
    loads, stores = ("".join(text.format(i=i, at=4 * i) for i in range(40)) for text in (
        "ld.volatile.global.f32 %f{i}, [%out+{at}];\n", "st.volatile.global.f32 [%out+{at}], %f{i};\n"))
    body = f".reg .f32 %f<40>; .reg .b64 %out; ld.param.u64 %out, [out];\n{loads}{stores}"
    (roomy,), (narrow,) = (resources(assembled(body, *options)[1]) for options in ((), ("-maxrregcount=24",)))
    assert roomy.registers > 40 and roomy.spilled == 0
    assert narrow.registers == 24 and narrow.spilled >= 4 * (40 - 24)
    assert build._row(narrow, narrow.shared)["spilled"] == narrow.spilled


UNIT = '''
import cutlass.cute as cute
from cutlass import Float32, Int64
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream


@cute.kernel
def halves(out: cute.Tensor, descriptor: Int64, s: Float32):
    code = BODY
    out[0], out[1] = cute.arch.inline_ptx(code, write_only_types=[Float32, Float32], read_only_args=[descriptor, s])


@cute.jit
def run(out: cute.Tensor, descriptor: Int64, s: Float32, stream):
    halves(out, descriptor, s).launch(grid=(1, 1, 1), block=(128, 1, 1), stream=stream)


def build(arch):
    out = make_fake_compact_tensor(Float32, (2,), assumed_align=16)
    return run, (out, Int64(0), Float32(1.0), make_fake_stream(use_tvm_ffi_env_stream=True))
'''


@pytest.mark.parametrize("second", [SAME, OTHER], ids=["same registers", "other registers"])
def test_a_unit_that_lacks_products_does_not_compile(tmp_path, monkeypatch, second):
    monkeypatch.setattr(cute, "BUILD", tmp_path / "build")
    code = "{ .reg .f32 %f<8>; .reg .b64 %b; add.s64 %b, %a, 2;" + HALF + READ.format(n=0) + second + "}"
    for name, operand in {"%a": "{$r0}", "%s": "{$r1}", "%x0": "{$w0}", "%x1": "{$w1}", "%": ""}.items():
        code = code.replace(name, operand)
    source = tmp_path / "device.py"
    source.write_text(UNIT.replace("BODY", repr(code)))
    unit = cute.Unit("run", source, "sm_90a")
    if second is OTHER:
        assert cute.compile_unit(unit).cubin.is_file()
        return
    with pytest.raises(cute.CompileError, match=r"^run\[\] for sm_90a: ptxas dropped 1 of 2 wgmma of \w*halves\w*$"):
        cute.compile_unit(unit)
    assert not [path for path in cute.BUILD.iterdir() if path.is_dir()]
