"""From a ``.cu`` file to a cubin, by NVRTC, once per architecture: no nvcc, no CUDA headers.

A cubin is kept on disk, under a name made of all that it depends on, and beside its checksum.
Nothing here needs a GPU or a driver; loading is ``cuda_load``'s, launching ``cuda_launch``'s.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import io
import os
import tempfile
from pathlib import Path
from typing import Any, Final, NamedTuple

_SOURCE: Final = Path(__file__).with_name("resample.cu")
RINGS: Final = Path(__file__).with_name("rings.cu")
_CHECKSUM_BYTES: Final = hashlib.sha256().digest_size
_REMEDY: Final = "pip install 'ppstream[cuda]'"


class Variant(NamedTuple):
    """Constants that the source is specialised for. The numbers are those of ``cuda_call``."""

    streams: int  # most per launch
    out: int  # dtype of the values written
    sources: int  # bits of the dtypes read
    modes: int  # bits of the modes that occur
    rings: int  # bit 0: counts or heads are given; 1: more stamps than are staged; 2: whole rings


class Plain(NamedTuple):
    """Of a source that is not specialised: no macros."""


class Compiled(NamedTuple):
    """A cubin and what the compiler had to say about the source."""

    cubin: bytes
    log: str


def compile_cubin(variant: Variant | Plain, arch: str, source: Path | None = None) -> Compiled:
    """Compiles now, whatever the disk holds.

    Args:
        variant: what for.
        arch: such as ``sm_90``.
        source: default ``resample.cu``.

    Raises:
        RuntimeError: cuda-core or NVRTC is missing.
        NVRTCError: of cuda-core, with the compiler's message: the source does not compile.
    """
    core = import_cuda("cuda.core")
    macros = [(name.upper(), str(number)) for name, number in variant._asdict().items()]
    file = source or _SOURCE
    options = core.ProgramOptions(
        arch=arch, std="c++17", define_macro=macros or None, name=file.name
    )
    log = io.StringIO()
    program = core.Program(file.read_text(), "c++", options)
    cubin = bytes(program.compile("cubin", logs=log).code)
    return Compiled(cubin, log.getvalue().rstrip("\0\n"))


def cached_cubin(
    variant: Variant | Plain, arch: str, folder: Path | None = None, source: Path | None = None
) -> bytes:
    """The cubin from disk, or compiled and then kept there.

    A file that is cut short or changed is compiled anew; a folder that cannot be written costs the
    compilation again in the next process.

    Args:
        variant: what for.
        arch: such as ``sm_90``.
        folder: default ``$XDG_CACHE_HOME/ppstream`` or ``~/.cache/ppstream``.
        source: default ``resample.cu``.

    Raises:
        RuntimeError: as ``compile_cubin``.
    """
    name = f"{(source or _SOURCE).stem}-{arch}-{_fingerprint(variant, arch, source)}.cubin"
    file = (folder or _cache_folder()) / name
    with contextlib.suppress(OSError):
        kept = file.read_bytes()
        checksum, cubin = kept[:_CHECKSUM_BYTES], kept[_CHECKSUM_BYTES:]
        if hashlib.sha256(cubin).digest() == checksum:
            return cubin
    cubin = compile_cubin(variant, arch, source).cubin
    with contextlib.suppress(OSError):
        _keep(file, hashlib.sha256(cubin).digest() + cubin)
    return cubin


def import_cuda(name: str) -> Any:
    """A module of cuda-core or cuda-bindings, which only a CUDA machine needs.

    Raises:
        RuntimeError: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as problem:
        raise RuntimeError(f"resampling on CUDA needs {name}: {_REMEDY}") from problem


def _fingerprint(variant: Variant | Plain, arch: str, source: Path | None) -> str:
    nvrtc = import_cuda("cuda.bindings.nvrtc")
    parts = ((source or _SOURCE).read_text(), arch, *variant, *nvrtc.nvrtcVersion())
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def _cache_folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "ppstream"


def _keep(file: Path, content: bytes) -> None:
    """Whole or not at all: several ranks may compile the same at the same time."""
    file.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=file.parent)
    with os.fdopen(descriptor, "wb") as draft:
        draft.write(content)
    Path(name).replace(file)
