"""What a rank knows of other programs on its GPU, with a library in the place of NVML."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FAKE = r"""
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
struct memory { unsigned v; unsigned long long total, reserved, free, used; };
struct process { unsigned pid; unsigned long long used; unsigned gi, ci; };
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) { *handle = 0; return 0; }
int nvmlDeviceGetMemoryInfo_v2(void *h, struct memory *m) {
    if (m->v != (sizeof *m | 2u << 24)) return 1;
    m->used = 7ull << 30; return 0; }
int nvmlDeviceGetGraphicsRunningProcesses_v3(void *h, unsigned *n, struct process *p) {
    *n = 0; return 0; }
int nvmlDeviceGetComputeRunningProcesses_v3(void *h, unsigned *n, struct process *p) {
    const char *text = getenv("LISTED"); int used, k = 0; unsigned pid;
    for (int at; text && sscanf(text, "%u:%d %n", &pid, &used, &at) == 2; text += at) {
        p[k].used = used < 0 ? ~0ull : (unsigned long long)used << 20;
        p[k++].pid = pid ? pid : (unsigned)getpid(); }
    *n = k; return 0; }
"""
READ = """
import ctypes, os, sys
from ppstream.cuda.nvml import GpuWatch
libc = ctypes.CDLL(None)
libc.setenv(b"LISTED", os.environ.get("BEFORE", "").encode(), 1)
watch = GpuWatch("GPU-1")
libc.setenv(b"LISTED", os.environ.get("AFTER", "").encode(), 1)
print(watch.found_bytes, watch.others_bytes())
"""
MIB = 1 << 20
RUN = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nvml")
    (folder / "nvml.c").write_text(FAKE)
    made = folder / "libnvidia-ml.so.1"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", made, folder / "nvml.c"], check=True)
    return folder


def read(library: Path | None, **environment: str) -> list[str]:
    """What a rank reads: bytes found, and bytes of others."""
    place = {} if library is None else {"LD_LIBRARY_PATH": str(library)}
    own = {k: v for k, v in os.environ.items() if k not in ("LD_LIBRARY_PATH", *RUN)}
    whole = own | place | environment
    done = subprocess.run(
        [sys.executable, "-c", READ], env=whole, capture_output=True, text=True, timeout=60
    )
    assert not done.returncode, done.stderr
    return done.stdout.split()


def test_processes_outside_the_run_are_counted_and_its_ranks_are_not(library: Path) -> None:
    ranks = [
        subprocess.Popen(["sleep", "60"], env=os.environ | RUN | {"MASTER_PORT": port})
        for port in ("1", "2")
    ]
    try:
        peer, other = (rank.pid for rank in ranks)
        listed = f"0:900 {peer}:500 {other}:1024"
        assert read(library, AFTER=listed, **RUN) == [str(7 << 30), str(1024 * MIB)]
        assert read(library, AFTER=f"0:900 {other}:-1", **RUN)[1] == "None"  # memory is not told
        assert read(library, AFTER=listed)[1] == "None"  # whether one is a rank
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def test_numbers_of_another_namespace_are_no_claim(library: Path) -> None:
    assert read(library, AFTER="99:1024", **RUN)[1] == "None"
    assert read(library, BEFORE="0:1", AFTER="0:1 99:1024", **RUN)[1] == "None"


def test_without_the_library_nothing_is_known() -> None:
    assert read(None) == ["None", "None"]
