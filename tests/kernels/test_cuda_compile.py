from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from ppstream_kernels import cuda_compile
from ppstream_kernels.cuda_clock import CLOCK
from ppstream_kernels.cuda_compile import (
    RINGS,
    Compiled,
    Plain,
    Variant,
    cached_cubin,
    compile_cubin,
    import_cuda,
)
from ppstream_kernels.cuda_put import PUT
from ppstream_kernels.cuda_wait import WAIT

ARCHS = ("sm_75", "sm_80", "sm_90", "sm_100")
LINES = Variant(streams=1, out=1, sources=0b0010, modes=0b00111, rings=0)  # bfloat16, straight
# By hand and by the GPU; with RARE every dtype meets every mode, without the cost of all at once.
PAIRS = (
    Variant(streams=24, out=0, sources=0b1111, modes=0b000111, rings=0b11),  # every dtype
    Variant(streams=24, out=0, sources=0b0010, modes=0b111111, rings=0b11),  # every mode
    Variant(streams=1, out=0, sources=0b0100, modes=0b111111, rings=0b11),
)
RARE = (
    Variant(streams=1, out=2, sources=0b0001, modes=0b100111, rings=0b01),  # cubics alone
    Variant(streams=4, out=4, sources=0b1001, modes=0b111111, rings=0b11),  # into int8
    Variant(streams=1, out=5, sources=0b0010, modes=0b000111, rings=0),  # into float8
)


@pytest.fixture(scope="module", autouse=True)
def nvrtc() -> None:
    try:
        import_cuda("cuda.core")
        import_cuda("cuda.bindings.nvrtc").nvrtcVersion()
    except RuntimeError as reason:  # NVRTC itself is looked up by its first call
        pytest.skip(f"nothing to compile with: {reason}")


@pytest.mark.parametrize(
    ("variant", "arch"),
    [
        *product((LINES,), ARCHS),
        *product(PAIRS[:2], ("sm_75",)),
        *product(PAIRS, ("sm_100",)),  # the conditions of sm_90 are the same
        *product(RARE[:2], ("sm_80", "sm_90")),  # the second has every mode
        *product(RARE[2:], ("sm_75", "sm_90")),  # by hand, and by the GPU
    ],
)
def test_the_source_compiles_without_a_warning(variant: Variant, arch: str) -> None:
    compiled = compile_cubin(variant, arch)
    assert compiled.log == ""
    assert compiled.cubin.startswith(b"\x7fELF")


@pytest.mark.parametrize("source", [RINGS, PUT, WAIT, CLOCK], ids=["rings", "put", "wait", "clock"])
@pytest.mark.parametrize("arch", ARCHS)
def test_a_source_without_variants_compiles_without_a_warning(arch: str, source: Path) -> None:
    compiled = compile_cubin(Plain(), arch, source)
    assert compiled.log == ""
    assert compiled.cubin.startswith(b"\x7fELF")


def test_sources_are_kept_apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cuda_compile, "compile_cubin", lambda *_: Compiled(b"cubin", ""))
    cached_cubin(LINES, "sm_90", tmp_path)
    cached_cubin(Plain(), "sm_90", tmp_path, RINGS)
    assert sorted(file.name.split("-")[0] for file in tmp_path.iterdir()) == ["resample", "rings"]


def test_a_warning_is_seen(tmp_path: Path) -> None:
    source = tmp_path / "unused.cu"
    source.write_text('constexpr int unused = 1;\nextern "C" __global__ void resample() {}\n')
    assert "never referenced" in compile_cubin(LINES, "sm_90", source).log


def test_a_source_that_does_not_compile_says_why(tmp_path: Path) -> None:
    source = tmp_path / "broken.cu"
    source.write_text("oops\n")
    with pytest.raises(Exception, match="oops"):
        compile_cubin(LINES, "sm_90", source)


def test_a_kept_cubin_is_not_compiled_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first = cached_cubin(Plain(), "sm_90", tmp_path, CLOCK)
    monkeypatch.setattr(cuda_compile, "compile_cubin", lambda *_: pytest.fail("compiled again"))
    assert cached_cubin(Plain(), "sm_90", tmp_path, CLOCK) == first


def test_a_damaged_cubin_is_replaced(tmp_path: Path) -> None:
    first = cached_cubin(Plain(), "sm_90", tmp_path, CLOCK)
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:-100])
    assert cached_cubin(Plain(), "sm_90", tmp_path, CLOCK) == first
    assert len(file.read_bytes()) > len(first)


def test_a_folder_that_cannot_be_written_only_costs_the_compilation(tmp_path: Path) -> None:
    occupied = tmp_path / "file"
    occupied.write_text("")
    assert cached_cubin(Plain(), "sm_90", occupied, CLOCK).startswith(b"\x7fELF")


def test_variants_and_architectures_are_kept_apart(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cuda_compile, "compile_cubin", lambda *_: Compiled(b"cubin", ""))
    for arch in ARCHS[:2]:
        for streams in (1, 4):
            cached_cubin(LINES._replace(streams=streams), arch, tmp_path)
    assert len(list(tmp_path.iterdir())) == 4
