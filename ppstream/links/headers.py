"""The int64 header rows of envelopes and results, and the slots both ranks lay out from them.

The link writes and checks index and generation; the stages write the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ppstream.analysis.records import EnvelopeLine, PolicyLine, words
from ppstream.config.schema import PipelineConfig
from ppstream.core.specs import TensorSpec
from ppstream.links.slots import LinkShape, SlotLayout


class EnvelopeStatus(NamedTuple):
    """Behind the link's own words of an envelope's header."""

    epoch: int
    seq: int


class ResultStatus(NamedTuple):
    """Behind the link's own words of a result's header."""

    epoch: int
    seq: int
    failed: int  # not 0: the tensors mean nothing; which of ``FAILURES``


_WORDS: Final = words(EnvelopeLine) | words(PolicyLine)
#: What stage B tells rank 0, in the order of its words.
TOLD: Final = tuple(sorted(_WORDS, key=_WORDS.__getitem__))
ENVELOPE_HEADER: Final = ("index", "generation", *EnvelopeStatus._fields)
RESULT_HEADER: Final = ("index", "generation", *ResultStatus._fields, *TOLD)
EPOCH: Final = RESULT_HEADER.index("epoch")  # in both headers, as seq
SEQ: Final = RESULT_HEADER.index("seq")
FAILED: Final = RESULT_HEADER.index("failed")
FAILURES: Final = (None, "policy_error", "unwritten")  # and the reason of the drop
_TOLD_AT: Final = slice(FAILED + 1, None)
_told_of: Final = attrgetter(*TOLD)
_TO_RANK0: Final = tuple((name, RESULT_HEADER.index(name)) for name in words(EnvelopeLine))
_TO_STAGE1: Final = tuple(words(PolicyLine))


def untold() -> PolicyLine:
    """Returns the measurements of a stage B that has not run."""
    zeros: dict[str, Any] = dict.fromkeys(_TO_STAGE1, 0)
    return PolicyLine(**zeros)


def tell(header: NDArray[np.int64], stage1: PolicyLine) -> None:
    """Write what stage B tells rank 0 into a result's header; none of it is None."""
    header[_TOLD_AT] = _told_of(stage1)


def take_told(header: Sequence[int], record: EnvelopeLine) -> None:
    """Write what a result's header tells into rank 0's line."""
    for name, word in _TO_RANK0:
        setattr(record, name, header[word])
    record.eB_ns = record.eB_ns or None


def repeat_told(stage1: PolicyLine, record: PolicyLine) -> None:
    """Write what stage B told rank 0 into the policy rank's own line."""
    for name in _TO_STAGE1:
        setattr(record, name, getattr(stage1, name))
    record.eB_ns = record.eB_ns or None


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
