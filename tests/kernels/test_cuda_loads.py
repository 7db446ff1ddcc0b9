"""What a launch reads that may begin while the one before it still writes: by plain loads only.

``ld.global.nc``, which ``__ldg`` asks for and the compiler may choose, is for memory that nobody
writes while the kernel runs. The PTX says what was asked for; no assembler makes more of it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from ppstream_kernels import cuda_compile
from ppstream_kernels.cuda_compile import Variant, import_cuda

RESAMPLE = Path(cuda_compile.__file__).with_name("resample.cu")
ARCHS = ("compute_90", "compute_100")  # those that overlap launches
ALL_DTYPES, ALL_RINGS = 0b1111, 0b11
BUT_SLERP = 0b10111  # which reads tables of the sine: constants; its samples it reads as angle does
VARIANTS = {
    "lean": Variant(streams=1, out=1, sources=0b0010, modes=0b00111, rings=0),
    "straight": Variant(streams=24, out=0, sources=ALL_DTYPES, modes=0b00111, rings=ALL_RINGS),
    "turning": Variant(streams=4, out=3, sources=ALL_DTYPES, modes=BUT_SLERP, rings=ALL_RINGS),
}
VECTORS = ("ld.global.v4", "ld.global.v2")  # of 16 and 8 bytes


@pytest.fixture(scope="module", autouse=True)
def nvrtc() -> None:
    try:
        import_cuda("cuda.bindings.nvrtc").nvrtcVersion()
    except RuntimeError as reason:  # NVRTC itself is looked up by its first call
        pytest.skip(f"nothing to compile with: {reason}")


def ptx_of(source: str, variant: Variant, arch: str) -> str:
    nvrtc = import_cuda("cuda.bindings.nvrtc")
    macros = [f"-D{name.upper()}={number}" for name, number in variant._asdict().items()]
    options = [option.encode() for option in (f"-arch={arch}", "-std=c++17", *macros)]
    _, program = nvrtc.nvrtcCreateProgram(source.encode(), RESAMPLE.name.encode(), 0, [], [])
    (error,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    assert error == 0
    _, size = nvrtc.nvrtcGetPTXSize(program)
    ptx = b" " * size
    nvrtc.nvrtcGetPTX(program, ptx)
    return ptx.decode()


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())
@pytest.mark.parametrize("arch", ARCHS)
def test_an_overlapped_launch_reads_nothing_as_if_it_were_constant(
    arch: str, variant: Variant
) -> None:
    ptx = ptx_of(RESAMPLE.read_text(), variant, arch)
    assert "griddepcontrol.wait" in ptx
    assert "ld.global.nc" not in ptx
    assert all(vector in ptx for vector in VECTORS)  # wide reads stay wide


def test_a_load_as_if_from_constants_is_seen() -> None:
    plain = "target.ns = call.tgt_ns[row * call.tgt_row_stride + at * call.tgt_stride];"
    constant = plain.replace("call.tgt_ns[", "__ldg(call.tgt_ns + ").replace("];", ");")
    source = RESAMPLE.read_text()
    assert plain in source
    assert "ld.global.nc" in ptx_of(source.replace(plain, constant), VARIANTS["lean"], ARCHS[0])
