"""Profiler traces: recorded ones, and events made by hand."""

import sqlite3
from pathlib import Path
from typing import Any

CPU_TRACE = Path(__file__).parents[1] / "golden/kineto-cpu.json.gz"  # of torch 2.13, 4 passes
US = 1000
#: name, start, end in us, stream, grid, launched at, correlation: three passes, the first warm-up.
KERNELS = [
    (name, 1000 * k + start, 1000 * k + end, stream, grid, 1000 * k + at, 10 * k + number)
    for k in range(3)
    for number, (name, start, end, stream, grid, at) in enumerate(
        [
            ("ampere_bf16_gemm_128x64", 110, 310, 7, 64, 100),
            ("ampere_bf16_gemm_128x64", 320, 330, 7, 2, 105),
            ("vectorized_elementwise_kernel<4>", 300, 350, 8, 8, 110),
            ("ncclDevKernel_SendRecv", 400, 450, 7, 1, 300),
        ]
    )
]
RANGES = [("warm-up", 50, 900), ("B", 1050, 1900), ("B", 2050, 2900)]
COPIES = [(99, 11), (98, 200)]  # and when it was asked for: the second one in the warm-up
ENCODE = [("encode", 1000 * k + 90, 1000 * k + 120) for k in range(3)]
SCHEMA = """
CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE ENUM_CUDA_MEMCPY_OPER (id INTEGER PRIMARY KEY, name TEXT, label TEXT);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INT NOT NULL, end INT NOT NULL, deviceId INT,
  contextId INT NOT NULL, streamId INT NOT NULL, correlationId INT, globalPid INT,
  demangledName INT NOT NULL, shortName INT NOT NULL, gridX INT NOT NULL, gridY INT NOT NULL,
  gridZ INT NOT NULL, blockX INT NOT NULL, blockY INT NOT NULL, blockZ INT NOT NULL);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INT NOT NULL, end INT NOT NULL, eventClass INT,
  globalTid INT, correlationId INT, nameId INT NOT NULL, returnValue INT);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INT NOT NULL, end INT NOT NULL, deviceId INT,
  streamId INT, correlationId INT, bytes INT NOT NULL, copyKind INT NOT NULL);
CREATE TABLE NVTX_EVENTS (start INT NOT NULL, end INT, eventType INT NOT NULL, text TEXT,
  globalTid INT, textId INT, domainId INT, uint64Value INT);
"""


def event(kind: str, name: str, start: float, end: float, **more: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": kind, "name": name, "ts": start, "dur": end - start, "pid": 1, **more}


def nsys(path: Path) -> Path:
    """The same work in the tables that Nsight Systems documents for its sqlite export."""
    path.unlink(missing_ok=True)
    export = sqlite3.connect(path)
    export.executescript(SCHEMA)
    calls = {"cudaLaunchKernel", "cudaMemcpyAsync"}
    names = sorted({k[0] for k in KERNELS} | calls | {"B", "encode"})
    ids = {name: number for number, name in enumerate(names)}
    export.executemany("INSERT INTO StringIds VALUES (?, ?)", [(i, n) for n, i in ids.items()])
    export.execute("INSERT INTO ENUM_CUDA_MEMCPY_OPER VALUES (1, 'HTOD', 'Host-to-Device')")
    for name, start, end, stream, grid, at, correlation in KERNELS:
        row = (start * US, end * US, 0, 1, stream, correlation, 1, ids[name], ids[name])
        export.execute(
            f"INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES ({', '.join('?' * 15)})",
            (*row, grid, 1, 1, 128, 1, 1),
        )
        launch = (at * US, (at + 4) * US, 0, 1, correlation, ids["cudaLaunchKernel"], 0)
        export.execute("INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?,?,?,?,?,?,?)", launch)
    for number, asked in COPIES:
        copy = ((asked + 9) * US, (asked + 13) * US, 0, 9, number, 4000, 1)
        export.execute("INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES (?,?,?,?,?,?,?)", copy)
        call = (asked * US, (asked + 2) * US, 0, 1, number, ids["cudaMemcpyAsync"], 0)
        export.execute("INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?,?,?,?,?,?,?)", call)
    for name, start, end in RANGES + ENCODE:
        text, text_id = (None, ids[name]) if name in ids else (name, None)
        mark = (start * US, end * US, 59, text, 1, text_id, 1, 7)
        export.execute("INSERT INTO NVTX_EVENTS VALUES (?,?,?,?,?,?,?,?)", mark)
    export.execute("INSERT INTO NVTX_EVENTS VALUES (5, NULL, 34, 'a mark', 1, NULL, 0, 0)")
    export.commit()
    export.close()
    return path
