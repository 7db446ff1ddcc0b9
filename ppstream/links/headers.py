"""The int64 header rows of envelopes and results, and the slots both ranks lay out from them.

The link writes and checks index and generation; the stages write the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ppstream.config.schema import PipelineConfig
from ppstream.core.specs import TensorSpec
from ppstream.links.slots import LinkShape, SlotLayout

ENVELOPE_HEADER: Final = ("index", "generation", "epoch", "seq")
EPOCH: Final = slice(2, 4)  # epoch and seq, in both headers
RESULT_HEADER: Final = (
    *ENVELOPE_HEADER,
    "failed",  # not 0: the tensors mean nothing; which of ``FAILURES``
    "tB0",
    "tB1",
    "B_ns",
    "eB_ns",  # 0: no device time
    "wait_input_ns",
    "wait_output_ns",
    "idle_ns",
    "residence_ns",
    "busy_link_ns",
)
FAILED: Final = 4
FAILURES: Final = (None, "policy_error", "unwritten")  # and the reason of the drop
DURATIONS: Final = slice(5, None)
BEHIND_LINK: Final = slice(2, None)  # all that the policy rank writes, in one assignment


def link_shape(
    config: PipelineConfig,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    generation: int,
    ahead: int = 0,
) -> LinkShape:
    """Returns what both ends of the link agree on.

    Args:
        config: rows and queue bounds.
        inputs: tensors of the cutter.
        outputs: tensors of the policy.
        generation: of this start of the run.
        ahead: as ``LinkShape.ahead``.
    """
    return LinkShape(
        SlotLayout(ENVELOPE_HEADER, tuple(inputs), config.batch.rows),
        SlotLayout(RESULT_HEADER, tuple(outputs), config.batch.rows),
        config.pipeline.d_in,
        config.pipeline.d_out,
        generation,
        ahead,
    )
