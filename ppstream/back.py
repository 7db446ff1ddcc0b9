"""The policy rank of a run: meets rank 0, builds the policy, serves until told to drain."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Final

import torch

from ppstream import cuda_start, ends, gpu_ranks, meeting, stopped_sibling
from ppstream.clock import NS_PER_S, now_ns
from ppstream.config import PipelineConfig
from ppstream.control import Peer
from ppstream.errors import ExitCode, PeerLostError, PpstreamError
from ppstream.front import SWITCH_INTERVAL_S
from ppstream.headers import link_shape
from ppstream.links import LauncherStore, join_store, open_back
from ppstream.messages import Goodbye
from ppstream.peer_process import PeerProcess
from ppstream.preflight import build_policy
from ppstream.runs import Run
from ppstream.stage1 import Stage1, StageB
from ppstream.stage1_device import Stage1Device
from ppstream.timestamps import Stage1Record, TimestampLog
from ppstream.waiter import Waiter
from ppstream.watching import Watching

OUTLIVE_DRAIN_S: Final = 2.0  # rank 0 says drain within drain_s; alone, this rank leaves later


class Patience:
    """A signal asks this rank to stop: it waits for rank 0 to say drain, but not for ever."""

    def __init__(self, limit_s: float) -> None:
        self._limit_ns = round(limit_s * NS_PER_S)
        self._asked_ns: int | None = None

    def asked(self, _signal: str) -> None:
        if self._asked_ns is None:
            self._asked_ns = now_ns()

    def is_over(self) -> bool:
        return self._asked_ns is not None and now_ns() - self._asked_ns > self._limit_ns


def run_back(config: PipelineConfig, end: ends.RankEnd) -> str:
    """A whole run on the policy rank; returns why it drained.

    Raises:
        PpstreamError: what ended it otherwise; rank 0 was told, if it is there.
    """
    ends.on_signals(ends.stop_early)
    ends.ignore_cut_signal()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    with ExitStack() as stack:
        watch = stopped_sibling.watched(end, config.liveness.frozen_ms)
        tell_watch = stack.enter_context(watch)
        store = join_store(timeout_s=config.liveness.handshake_s)
        placement = gpu_ranks.place_here(config, store.world_size)
        peer, end.run = meeting.introduce(config, store)
        stack.callback(peer.close)
        end.peer_process = PeerProcess.at_end_of(peer.fileno())
        patience = Patience(config.liveness.drain_s + OUTLIVE_DRAIN_S)
        ends.on_signals(patience.asked)
        loop: list[Stage1 | Stage1Device] = []  # one, once it exists
        beat = meeting.start_heartbeat(
            config, peer, lambda: loop[0].progress if loop else 0, end.leave_when_lost
        )
        stack.callback(beat.stop)
        with telling(peer):
            device = torch.device(placement.ranks[-1].device)
            if device.type == "cuda":
                cuda_start.start(device)
            policy = build_policy(config, device)
            meeting.offer_tensors(peer, policy.inputs, policy.outputs)
            inputs = meeting.offered(peer)
            shape = link_shape(config, inputs, policy.outputs, store.generation)
            log = _log(config, end.run, store)
            stack.callback(log.close)
            Watching(config, end.run, log, stack, rank=store.rank, generation=store.generation)
            waiter = Waiter()
            stack.callback(waiter.close)
            assert placement.link is not None
            stage1: Stage1 | Stage1Device
            if placement.is_device_ordered:
                stage1 = gpu_ranks.open_stage1(
                    config, policy, placement, peer, store, shape, log, waiter
                )
            else:
                link = open_back(placement.link, peer, store, shape)
                prepared = gpu_ranks.policy_for_host_slots(policy, config, device)
                stage_b = StageB(prepared, config.batch.rows)
                stage1 = Stage1(config, stage_b, link, peer, log, waiter)
            stack.callback(stage1.link.close)
            loop.append(stage1)
            watchdog = ends.start_watchdog(config, stage1, end, peer.send)
            stack.callback(watchdog.stop)
            stage1.on_phase.append(tell_watch)
            reason = stage1.run(patience.is_over)
            log.flush()
        end.is_drained = True
        peer.send(Goodbye(int(ExitCode.DRAINED), reason))
        return reason


def _log(config: PipelineConfig, run: Run, store: LauncherStore) -> TimestampLog:
    return TimestampLog(
        run.log_path(store.rank, store.generation),
        Stage1Record,
        config.log.ring,
        run_id=run.run_id,
        generation=store.generation,
    )


@contextmanager
def telling(peer: Peer) -> Iterator[None]:
    """Tell rank 0 why this rank ends, unless it went first; then what it said is the reason."""
    try:
        yield
    except PeerLostError as error:
        raise meeting.last_words(peer) or error from None
    except Exception as error:
        is_ours = isinstance(error, PpstreamError)
        code = error.exit_code if isinstance(error, PpstreamError) else ExitCode.INTERNAL
        text = str(error) if is_ours else f"{type(error).__name__}: {error}"
        with suppress(PeerLostError):
            peer.send(Goodbye(int(code), text))
        raise
