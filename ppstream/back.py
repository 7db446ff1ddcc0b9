"""The policy rank of a run: meets rank 0, builds the policy, serves until told to drain."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from typing import Final

import torch

from ppstream import ends, meeting
from ppstream.clock import NS_PER_S, now_ns
from ppstream.config import PipelineConfig
from ppstream.errors import ExitCode, PeerLostError, PpstreamError
from ppstream.front import SWITCH_INTERVAL_S
from ppstream.headers import link_shape
from ppstream.links import join_store, open_back
from ppstream.messages import Goodbye
from ppstream.placement import place
from ppstream.preflight import build_policy
from ppstream.stage1 import Stage1, StageB
from ppstream.timestamps import Stage1Record, TimestampLog
from ppstream.waiter import Waiter

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
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    with ExitStack() as stack:
        store = join_store(timeout_s=config.liveness.handshake_s)
        placement = place(config, store.world_size, meeting.ranks_on_this_host(store.world_size))
        peer, end.run = meeting.introduce(config, store)
        stack.callback(peer.close)
        patience = Patience(config.liveness.drain_s + OUTLIVE_DRAIN_S)
        ends.on_signals(patience.asked)
        loop: list[Stage1] = []  # one, once it exists
        beat = meeting.start_heartbeat(
            config, peer, lambda: loop[0].progress if loop else 0, end.leave_when_lost
        )
        stack.callback(beat.stop)
        try:
            policy = build_policy(config, torch.device("cpu"))
            meeting.offer_tensors(peer, policy.inputs, policy.outputs)
            inputs = meeting.offered(peer)
            shape = link_shape(config, inputs, policy.outputs, store.generation)
            assert placement.link is not None
            link = open_back(placement.link, peer, store, shape)
            stack.callback(link.close)
            log = TimestampLog(
                end.run.log_path(store.rank, store.generation),
                Stage1Record,
                config.log.ring,
                run_id=end.run.run_id,
                generation=store.generation,
            )
            stack.callback(log.close)
            waiter = Waiter()
            stack.callback(waiter.close)
            stage1 = Stage1(config, StageB(policy, config.batch.rows), link, peer, log, waiter)
            loop.append(stage1)
            reason = stage1.run(patience.is_over)
            log.flush()
        except PeerLostError:
            raise
        except PpstreamError as error:
            peer.send(Goodbye(int(error.exit_code), str(error)))
            raise
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            peer.send(Goodbye(int(ExitCode.INTERNAL), text))
            raise
        end.is_drained = True
        peer.send(Goodbye(int(ExitCode.DRAINED), reason))
        return reason
