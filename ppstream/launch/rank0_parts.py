"""Parts of rank 0's loop, whatever executes."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, NamedTuple

from ppstream.config.schema import PipelineConfig, SimulateConfig
from ppstream.core.clock import NS_PER_MS
from ppstream.core.simulated_delay import Delay
from ppstream.core.waiter import Waiter
from ppstream.observe.log_writer import EnvelopeRecord, TimestampLog
from ppstream.observe.run_folder import Run
from ppstream.pipeline.credits import CreditLedger
from ppstream.pipeline.stage_a import StageA
from ppstream.pipeline.stage_c import StageC
from ppstream.policy.compatibility import build_decoder

if TYPE_CHECKING:
    from ppstream.pipeline.device.stage_a import DeviceStageA


class Rank0Parts(NamedTuple):
    """The arguments of ``Rank0Loop`` before its executor, in its order."""

    config: PipelineConfig
    stage_a: StageA | DeviceStageA
    stage_c: StageC
    credit_ledger: CreditLedger
    log: TimestampLog
    waiter: Waiter


def rank0_parts(config: PipelineConfig, run: Run, generation: int, stack: ExitStack) -> Rank0Parts:
    """New parts; ``stack`` closes them."""
    log = TimestampLog(
        run.log_path(0, generation),
        EnvelopeRecord,
        config.log.ring,
        run_id=run.run_id,
        generation=generation,
    )
    stack.callback(log.close)
    waiter = Waiter(round(config.pipeline.spin_ms * NS_PER_MS))
    stack.callback(waiter.close)
    simulate = config.simulate
    delay_a = _delay(simulate, simulate.a_ms, simulate.seed)
    delay_c = _delay(simulate, simulate.c_ms, simulate.seed + 1)
    decoder = build_decoder(config)
    credit_ledger = CreditLedger(config.pipeline.d_in, config.pipeline.d_out)
    stage_c = StageC(config, decoder, delay_c)
    return Rank0Parts(config, StageA(config, delay_a), stage_c, credit_ledger, log, waiter)


def _delay(simulate: SimulateConfig, mean_ms: float, seed: int) -> Delay:
    """Work on a GPU is its executor's to queue, and takes none of this thread's time."""
    if simulate.kind == "gpu":
        return Delay(0.0)
    return Delay(mean_ms, simulate.kind, simulate.law, seed)
