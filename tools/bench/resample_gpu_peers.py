"""Peers of resampling on a GPU: ways that people write by hand, values only.

No validity, no age, no rings. Raw kernels are called bare, which is their best case.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any, Final

import torch
import triton
import triton.language as tl
from bench.gpu_timing import Calls
from cuda.core import Device, LaunchConfig, Program, ProgramOptions, launch
from torch import Tensor

COPY_CONFIGS: Final = tuple((t, n) for t in (256, 512, 1024) for n in (1, 2, 4))  # threads, words

_SOURCE: Final = """
typedef long long i64;
#if BYTES == 2
typedef unsigned short T;
__device__ float widen(T x) { return __uint_as_float((unsigned)x << 16); }
__device__ T narrow(float x) { T y; asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x)); return y; }
#else
typedef float T;
__device__ float widen(T x) { return x; }
__device__ T narrow(float x) { return x; }
#endif
extern "C" __global__ void copy(uint4* to, const uint4* from, i64 words) {
    const i64 step = (i64)gridDim.x * blockDim.x;
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < words; i += step) to[i] = from[i];
}
// One thread per element, one search per element.
extern "C" __global__ void naive(
    T* out, const T* src, const i64* src_ns, const i64* tgt_ns, int slots, int targets, int dim,
    i64 all) {
    const i64 at = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= all) return;
    const i64 target = at / dim, row = target / targets;
    const int d = at - target * dim;
    const i64* const stamps = src_ns + row * slots;
    const i64 t = tgt_ns[target];
    int low = 0, high = slots;
    while (low < high) {
        const int middle = (low + high) / 2;
        if (stamps[middle] <= t) low = middle + 1; else high = middle;
    }
    const int after = min(max(low, 1), slots - 1);
    const i64 before = stamps[after - 1];
    const float weight = (float)(t - before) / (float)(stamps[after] - before);
    const float w = fminf(fmaxf(weight, 0.f), 1.f);
    const float a = widen(src[(row * slots + after - 1) * dim + d]);
    const float b = widen(src[(row * slots + after) * dim + d]);
    out[at] = narrow(a + w * (b - a));
}
"""


def formula(
    src: Tensor, src_ns: Tensor, tgt_ns: Tensor, wide: torch.dtype = torch.float32
) -> Tensor:
    """searchsorted, gather, lerp; arithmetic in ``wide``, rounded once to the dtype of ``src``."""
    rows, slots, dim = src.shape
    after = torch.searchsorted(src_ns, tgt_ns, right=True).clamp(1, slots - 1)
    before_ns = src_ns.gather(1, after - 1)
    gap_ns = src_ns.gather(1, after) - before_ns
    weight = ((tgt_ns - before_ns).to(wide) / gap_ns.to(wide)).clamp(0, 1).unsqueeze(2)
    flat = after + torch.arange(rows, device=src.device).unsqueeze(1) * slots
    samples = src.reshape(-1, dim)
    first, second = samples[flat - 1].to(wide), samples[flat].to(wide)
    return torch.lerp(first, second, weight).to(src.dtype)


def error_of(values: Tensor, src: Tensor, src_ns: Tensor, tgt_ns: Tensor) -> float:
    """Relative (Frobenius) to float64; of the first rows, which say as much as all."""
    rows = slice(0, 64)
    exact = formula(src[rows].double(), src_ns[rows], tgt_ns[rows], torch.float64)
    return float((values[rows].double() - exact).norm() / exact.norm())


compiled_formula = torch.compile(formula, fullgraph=True, dynamic=False)


class _CurrentStream:
    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, torch.cuda.current_stream().cuda_stream


@cache
def _kernels(element_bytes: int) -> Any:
    device = Device(torch.cuda.current_device())
    device.set_current()
    major, minor = torch.cuda.get_device_capability()
    macros = [("BYTES", str(element_bytes))]
    options = ProgramOptions(arch=f"sm_{major}{minor}", std="c++17", define_macro=macros)
    return Program(_SOURCE, "c++", options).compile("cubin")


def copy_call(to: Tensor, source: Tensor, threads: int, words: int) -> Callable[[], None]:
    """Copies bytes in 16-byte words, ``words`` per thread."""
    kernel, count = _kernels(2).get_kernel("copy"), to.nbytes // 16
    config = LaunchConfig(grid=max(1, -(-count // (threads * words))), block=threads)

    def call() -> None:  # holds the tensors, not their addresses alone
        launch(_stream(), config, kernel, to.data_ptr(), source.data_ptr(), count)

    return call


def floors(call_bytes: int, sets: int) -> dict[str, Calls]:
    """Plain copies of as many bytes as a call must move, ways for ``graphed_us``."""
    half = max(16, call_bytes // 2 // 16 * 16)
    pairs = [
        [torch.empty(half, dtype=torch.uint8, device="cuda") for _ in range(2)] for _ in range(sets)
    ]
    return {
        f"floor {config}": [copy_call(*pair, *config) for pair in pairs] for config in COPY_CONFIGS
    }


def naive_call(out: Tensor, src: Tensor, src_ns: Tensor, tgt_ns: Tensor) -> Callable[[], None]:
    """One thread per element."""
    kernel = _kernels(src.element_size()).get_kernel("naive")
    config = LaunchConfig(grid=-(-out.numel() // 256), block=256)
    addresses = [tensor.data_ptr() for tensor in (out, src, src_ns, tgt_ns)]
    sizes = [ctypes.c_int(n) for n in (src.shape[1], tgt_ns.shape[1], src.shape[2])]
    return lambda: launch(_stream(), config, kernel, *addresses, *sizes, out.numel())


def _stream() -> Any:
    return Device(torch.cuda.current_device()).create_stream(_CurrentStream())


@triton.jit  # type: ignore[untyped-decorator]
def _triton_kernel(
    out,
    src,
    src_ns,
    tgt_ns,
    slots,
    targets,
    dim,
    tiles,
    LEVELS: tl.constexpr,
    TILE: tl.constexpr,
    WIDE: tl.constexpr,
):  # type: ignore[no-untyped-def]
    row = (tl.program_id(0) // tiles).to(tl.int64)
    t = tl.program_id(0) % tiles * TILE + tl.arange(0, TILE)
    live = t < targets
    target_ns = tl.load(tgt_ns + row * targets + t, mask=live, other=0)
    low = tl.zeros([TILE], tl.int32)
    high = low + slots
    for _ in range(LEVELS):
        middle = (low + high) // 2
        searching = low < high
        stamp_ns = tl.load(src_ns + row * slots + middle, mask=live & searching, other=0)
        low = tl.where(searching & (stamp_ns <= target_ns), middle + 1, low)
        high = tl.where(searching & (stamp_ns > target_ns), middle, high)
    after = tl.minimum(tl.maximum(low, 1), slots - 1)
    before_ns = tl.load(src_ns + row * slots + after - 1, mask=live, other=0)
    gap_ns = tl.load(src_ns + row * slots + after, mask=live, other=1) - before_ns
    weight = (target_ns - before_ns).to(tl.float32) / gap_ns.to(tl.float32)
    weight = tl.minimum(tl.maximum(weight, 0.0), 1.0)[:, None]
    for left in range(0, dim, WIDE):
        d = left + tl.arange(0, WIDE)
        inside = live[:, None] & (d < dim)[None, :]
        at = (row * slots + after)[:, None] * dim + d[None, :]
        first = tl.load(src + at - dim, mask=inside, other=0).to(tl.float32)
        second = tl.load(src + at, mask=inside, other=0).to(tl.float32)
        value = first + weight * (second - first)
        tl.store(out + (row * targets + t)[:, None] * dim + d[None, :], value, mask=inside)


TRITON_CONFIGS: Final = ((8, 4), (32, 4), (64, 8))  # targets per program, warps


def triton_call(
    out: Tensor, src: Tensor, src_ns: Tensor, tgt_ns: Tensor, tile: int, warps: int
) -> Callable[[], None]:
    """A Triton kernel with one search per target."""
    rows, slots, dim = src.shape
    targets = tgt_ns.shape[1]
    wide = min(256, triton.next_power_of_2(dim))
    tiles, levels = -(-targets // tile), slots.bit_length()
    arguments = (out, src, src_ns, tgt_ns, slots, targets, dim, tiles, levels, tile, wide)
    return lambda: _triton_kernel[(tiles * rows,)](*arguments, num_warps=warps)
