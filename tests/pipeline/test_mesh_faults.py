"""Who raised on an envelope of a mesh: all of its ranks, or the run ends."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist

from ppstream.core.clock import NS_PER_S
from ppstream.core.errors import ExitCode, MeshSplitError
from ppstream.cuda import startup
from ppstream.pipeline.mesh_faults import (
    MeshFaults,
    is_lost_connection,
    waits_for_collective,
    waits_for_gpu,
)

SLEEP_CYCLES = 2_000_000_000  # a second


def test_an_envelope_on_which_every_rank_raises_is_over() -> None:
    faults = MeshFaults((1, 2, 3))
    for rank in (3, 1, 2):
        faults.note(rank, 7, "ValueError: no", rank)
    faults.check(100 * NS_PER_S)


def test_a_rank_that_raises_alone_is_named_once_the_others_had_their_time() -> None:
    faults = MeshFaults((1, 2, 3))
    faults.note(2, 7, "ValueError: no", 0)
    faults.note(3, 7, "MemoryError: no more", NS_PER_S // 2)
    faults.check(NS_PER_S)
    with pytest.raises(MeshSplitError) as split:
        faults.check(NS_PER_S + 1)
    assert str(split.value).startswith(
        "rank 2 raised ValueError: no; rank 3 raised MemoryError: no more on envelope 7, "
        "but rank 1 did not within 1 s"
    )
    assert split.value.exit_code is ExitCode.POISONED


def test_only_words_of_a_closed_connection_are_a_lost_rank() -> None:
    closed = "[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer"
    assert is_lost_connection(RuntimeError(closed))
    assert not is_lost_connection(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_lost_connection(ValueError(closed))
    nccl = (
        "NCCL error in: NCCLUtils.cpp:94, remote process exited or there was a network error, NCCL "
        "version 2.28.9\nncclRemoteError: A call failed possibly due to a network error or a "
        "remote process exiting prematurely."
    )
    assert is_lost_connection(dist.DistBackendError(nccl))
    wrong = "NCCL error in: NCCLUtils.cpp:94, invalid usage\nncclInvalidUsage: wrong arguments"
    assert not is_lost_connection(dist.DistBackendError(wrong))


def test_a_thread_outside_of_collectives_does_not_wait_for_one() -> None:
    assert not waits_for_collective(threading.get_ident())
    assert not waits_for_collective(-1)
    code = compile(
        "def inner(ident): return waits_for_collective(ident)", "x/torch/distributed/y", "exec"
    )
    names = {"waits_for_collective": waits_for_collective}
    exec(code, names)
    assert names["inner"](threading.get_ident())


def test_nobody_waits_for_a_gpu_where_none_is_used() -> None:
    assert not waits_for_gpu()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_thread_waits_for_its_gpu_while_that_has_work() -> None:
    startup.start(torch.device("cuda", 0))
    torch.cuda.synchronize()
    assert not waits_for_gpu()
    torch.cuda._sleep(SLEEP_CYCLES)
    seen: list[bool] = []
    watchdog = threading.Thread(target=lambda: seen.append(waits_for_gpu()))
    watchdog.start()
    watchdog.join()
    assert seen == [True]
    torch.cuda.synchronize()
    assert not waits_for_gpu()
