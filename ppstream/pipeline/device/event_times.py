"""Times of one envelope from its events: the log's stamps, durations and waits.

Pure: takes times that are mapped to the host's clock already. On a device-ordered link waits are
the gaps between events, so each thread's time is conserved by construction; the credit, residence
and outstanding audits carry the weight.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from ppstream.observe.log_writer import EnvelopeRecord, PolicyRecord


class Rank0Times(NamedTuple):
    """One envelope on rank 0's device, host clock, ns."""

    a0: int
    a1: int
    committed: int  # A is over, and the credit is there: the later of the two
    received: int
    c0: int
    c1: int


class PolicyTimes(NamedTuple):
    """One envelope on the policy rank's device, host clock, ns."""

    complete: int  # the envelope, all of it
    b0: int
    b1: int


def record_rank0_times(
    record: EnvelopeRecord,
    times: Rank0Times,
    before: Rank0Times | None,
    credit_ns: int,
    queued_ns: int,
    *,
    waits_for_input: bool,
) -> None:
    """Stamps and waits of one envelope, but ``tEmit``, which only an emitted one has.

    Args:
        record: filled.
        times: of this envelope.
        before: of the one before it; None behind a pause.
        credit_ns: when the result was received whose credit this envelope took; 0: none needed.
        queued_ns: when the host had queued A.
        waits_for_input: the host queues A when input comes, and no sooner.
    """
    a0_ns, a1_ns, committed_ns, received_ns, c0_ns, c1_ns = times
    record.tA0, record.tA1, record.tSend = a0_ns, a1_ns, committed_ns
    record.tRecv, record.tDecode = received_ns, c0_ns
    record.eA_ns, record.eC_ns = a1_ns - a0_ns, c1_ns - c0_ns
    free_ns = a0_ns if before is None else before.a1
    gap_ns = max(0, a0_ns - free_ns)
    for_credit_ns = min(max(0, credit_ns - free_ns), gap_ns)
    for_input_ns = 0
    if waits_for_input:
        late_ns = queued_ns - max(free_ns, credit_ns)
        for_input_ns = min(max(0, late_ns), gap_ns - for_credit_ns)
    record.w_credit_ns, record.w_input_ns = for_credit_ns, for_input_ns
    record.busy_link_ns = gap_ns - for_credit_ns - for_input_ns
    record.w_slot_ns = record.w_emit_ns = 0
    record.w_result_ns = 0 if before is None else max(0, c0_ns - before.c1)


def record_policy_times(
    record: PolicyRecord, times: PolicyTimes, before: PolicyTimes | None
) -> None:
    """Durations and waits of one envelope on the policy rank."""
    complete_ns, b0_ns, b1_ns = times
    record.tB0, record.tB1 = b0_ns, b1_ns
    record.eB_ns = b1_ns - b0_ns
    idle_ns = 0 if before is None else max(0, b0_ns - before.b1)
    waited_ns = 0 if before is None else min(max(0, complete_ns - before.b1), idle_ns)
    record.idle_ns, record.wait_input_ns, record.wait_output_ns = idle_ns, waited_ns, 0
    record.busy_link_ns = idle_ns - waited_ns
    record.residence_ns = b1_ns - min(complete_ns, b0_ns)
