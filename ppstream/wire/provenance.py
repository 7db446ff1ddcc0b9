"""Provenance: where the age of one action chunk comes from, part by part.

Durations only, each measured by one clock: no part needs two clocks that agree.
"""

from __future__ import annotations

import msgspec


class Provenance(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What rank 0 knows of a chunk's age when it emits it; in nanoseconds.

    ``input_age_ns``: by stream, from the newest sample used to the window's end, both stamped by
    the robot; a stream without a sample is missing. The others follow one another on rank 0's way,
    from the arrival of the newest reference sample to the emit; their sum is ``server_ns``.
    """

    input_age_ns: dict[str, int]
    wait_a_ns: int  # for a credit and for stage A
    a_ns: int  # stage A, to the commit of the envelope
    links_ns: int  # both ways together: only their sum can be measured without a common clock
    wait_b_ns: int  # in D_in, on the policy rank
    b_ns: int  # stage B
    wait_c_ns: int  # in D_out
    c_ns: int  # stage C, to the emit

    @property
    def server_ns(self) -> int:
        """From the newest reference sample's arrival to the emit."""
        stages_ns = self.a_ns + self.b_ns + self.c_ns
        return stages_ns + self.wait_a_ns + self.links_ns + self.wait_b_ns + self.wait_c_ns
