"""Layout that robot, policy, decoder and training share: streams, window, action chunk. No torch.

``demo.toml`` says the same to the runtime; a test compares the two.
"""

from __future__ import annotations

from typing import Final, NamedTuple

STEP_NS: Final = 1_000_000  # one step of the physics


class Stream(NamedTuple):
    """One sensor: what it measures, how often, and how noisy it is."""

    name: str
    fields: tuple[str, ...]
    period_ms: float  # mean time between samples
    wander_ms: float  # a capture happens up to this much early or late
    noise: tuple[float, ...]  # standard deviation per field
    interpolation: str


#: In the order of the window's columns. Only the encoder is interpolated: a step of the window must
#: not contain what was measured after it, or training on all steps of a history would peek.
STREAMS: Final = (
    Stream("encoder", ("position_m", "angle_rad"), 1.0, 0.0, (3e-4, 1e-3), "linear"),
    Stream(
        "imu",
        ("gyro_rad_s", "forward_m_s2", "upward_m_s2"),
        5.0,
        1.0,
        (0.02, 0.3, 0.3),
        "previous",
    ),
    Stream("camera", ("tip_x_m", "tip_z_m"), 1000 / 30, 3.0, (3e-3, 3e-3), "previous"),
)
STAMP_JITTER_NS: Final = 100_000  # standard deviation of a capture stamp's error
DIM: Final = sum(len(stream.fields) for stream in STREAMS)

WINDOW_STEPS: Final = 64
WINDOW_DT_NS: Final = 2_000_000

ACTION: Final = "force_n"
HORIZON: Final = 18
ACTION_DT_NS: Final = 5_000_000
LEASE_NS: Final = 90_000_000
FORCE_MAX_N: Final = 15.0

FALL_ANGLE_RAD: Final = 0.6
FALL_POSITION_M: Final = 1.0
