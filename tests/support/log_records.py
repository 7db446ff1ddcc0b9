"""Records as the log's drain thread sees them."""

from ppstream.observe.log_writer import EnvelopeRecord

MS = 1_000_000
LEASE_NS = 20 * MS


def envelope(seq: int, **changes: object) -> EnvelopeRecord:
    """One of a pipeline with A 2, wait 1, B 5, decode wait 1, C 3 ms, and 0.5 ms of transfers."""
    t0 = seq * 6 * MS
    record = EnvelopeRecord(
        kind="envelope",
        epoch=0,
        seq=seq,
        mode="throughput",
        phase="ready",
        tA0=t0,
        tA1=t0 + 2 * MS,
        tSend=t0 + 2 * MS,
        tRecv=t0 + 2 * MS + 6_500_000,
        tDecode=t0 + 2 * MS + 7_500_000,
        tEmit=t0 + 2 * MS + 10_500_000,
        B_ns=5 * MS,
        residence_ns=6 * MS,
        w_input_ns=MS,
        age_rank0_ns=13 * MS,
        window_end_ns=100,
        expires_ns=100 + LEASE_NS,
        input_age_ns={"imu": 3 * MS},
    )
    for name, value in changes.items():
        setattr(record, name, value)
    return record
