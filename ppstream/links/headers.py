"""The int64 header rows of envelopes and results, and the slots both ranks lay out from them.

The link writes and checks index and generation; the stages write the rest. The measurements in a
result's header are the fields that ``analysis/records.py`` declares with ``in_header``.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, Final, NamedTuple

from ppstream.analysis.records import EnvelopeLine, PolicyLine, header_words
from ppstream.config.schema import PipelineConfig
from ppstream.core.specs import TensorSpec
from ppstream.links.slots import LinkShape, SlotLayout


class EnvelopeStatus(NamedTuple):
    """The numbers behind index and generation in an envelope's header."""

    epoch: int
    seq: int
    failed: int = 0  # index into ``FAILURES``; not 0: the tensors are invalid


class ResultStatus(NamedTuple):
    """The numbers behind index and generation in a result's header."""

    epoch: int
    seq: int
    failed: int  # as in an envelope's


_WORDS: Final = header_words(EnvelopeLine) | header_words(PolicyLine)
#: The measurements in a result's header, in their order.
STAGE_B: Final = tuple(sorted(_WORDS, key=_WORDS.__getitem__))
ENVELOPE_HEADER: Final = ("index", "generation", *EnvelopeStatus._fields)
RESULT_HEADER: Final = ("index", "generation", *ResultStatus._fields, *STAGE_B)
EPOCH: Final = RESULT_HEADER.index("epoch")  # in both headers, as seq and failed
SEQ: Final = RESULT_HEADER.index("seq")
FAILED: Final = RESULT_HEADER.index("failed")
FAILURES: Final = (None, "policy_error", "unwritten", "replica_lost")  # and the drop's reason
REPLICA_LOST: Final = FAILURES.index("replica_lost")  # nobody sends it: rank 0 writes it itself
_STAGE_B_AT: Final = (FAILED + 1) * 8  # bytes
_write_words: Final = struct.Struct(f"={len(STAGE_B)}q").pack_into
_stage_b_of: Final = attrgetter(*STAGE_B)
_TO_RANK0: Final = tuple((name, RESULT_HEADER.index(name)) for name in header_words(EnvelopeLine))
_SLOWEST: Final = tuple(RESULT_HEADER.index(name) for name in ("B_ns", "eB_ns"))
_RESIDENCE: Final = RESULT_HEADER.index("residence_ns")
_TO_STAGE1: Final = tuple(header_words(PolicyLine))


def new_stage_b() -> PolicyLine:
    """Returns a record for stage B's measurements, all of them 0."""
    zeros: dict[str, Any] = dict.fromkeys(_TO_STAGE1, 0)
    return PolicyLine(**zeros)


def write_stage_b(words: memoryview, stage1: PolicyLine) -> None:
    """Copy stage B's measurements into a result's header; none of them may be None."""
    _write_words(words, _STAGE_B_AT, *_stage_b_of(stage1))


def add_places(words: memoryview, before: memoryview) -> None:
    """Add what the places before measured: rank 0's line has the slowest B, and all residences."""
    for word in _SLOWEST:
        words[word] = max(words[word], before[word])
    words[_RESIDENCE] += before[_RESIDENCE]


def read_stage_b(header: Sequence[int], record: EnvelopeLine) -> None:
    """Copy stage B's measurements from a result's header into rank 0's line."""
    for name, word in _TO_RANK0:
        setattr(record, name, header[word])
    record.eB_ns = record.eB_ns or None  # 0: no device time


def log_stage_b(stage1: PolicyLine, record: PolicyLine) -> None:
    """Copy stage B's measurements into the policy rank's line."""
    for name in _TO_STAGE1:
        setattr(record, name, getattr(stage1, name))
    record.eB_ns = record.eB_ns or None  # 0: no device time


def link_shape(
    config: PipelineConfig,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    generation: int,
    ahead: int = 0,
    place: int = 0,
) -> LinkShape:
    """Returns what both ends of a rank's hops agree on.

    Args:
        config: rows and queue bounds.
        inputs: tensors of the hop that leads to the policy, or in front of this policy rank.
        outputs: tensors of the hop that leads from it.
        generation: of this start of the run.
        ahead: as ``LinkShape.ahead``.
        place: of this rank in a chain.
    """
    is_first_hop = place <= 1
    header = ENVELOPE_HEADER if is_first_hop else RESULT_HEADER
    return LinkShape(
        SlotLayout(header, tuple(inputs), config.batch.rows),
        SlotLayout(RESULT_HEADER, tuple(outputs), config.batch.rows),
        config.pipeline.d_in,
        config.pipeline.d_out,
        generation,
        ahead,
        is_first_hop,
    )
