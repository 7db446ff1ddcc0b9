"""CartPole: the simulated robot's body, its sensors, the kicks it receives and its fixture.

It knows simulated time only: one ``step`` is one millisecond. The robot process maps that to its
clock; training and lock-step runs use it as it is.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, NamedTuple

import mujoco
import numpy as np

from ppstream_stages.cartpole.layout import (
    FALL_ANGLE_RAD,
    FALL_POSITION_M,
    STAMP_JITTER_NS,
    STEP_NS,
    STREAMS,
)

MODEL: Final = Path(__file__).with_name("model.xml")

KICK_MIN_N_S: Final = 8e-3  # newton seconds along x at the pole's tip: 0.36 to 0.67 rad/s
KICK_MAX_N_S: Final = 15e-3
KICK_STEPS: Final = 10  # a kick lasts this long
KICK_EVERY_MS: Final = (700, 1500)
FIRST_KICK_MS: Final = (200, 400)  # after release

#: Where a stream's fields lie in MuJoCo's sensor vector (the rotation axis is y).
_COLUMNS: Final = {
    "encoder": np.array([0, 1]),  # position, angle
    "imu": np.array([3, 5, 7]),  # gyro y, accelerometer x and z
    "camera": np.array([8, 10]),  # tip x and z
}
_NOISE_BLOCK: Final = 1024


class Reading(NamedTuple):
    """One reading: its stream's index, its capture stamp in simulated time, its values."""

    stream: int
    stamp_ns: int
    values: np.ndarray[Any, np.dtype[np.float32]]


class CartPole:
    """A cart-pole held by its fixture until ``release``; the same seed gives the same kicks."""

    def __init__(self, seed: int, *, kicks: bool = True) -> None:
        self.model = mujoco.MjModel.from_xml_path(str(MODEL))
        self.data = mujoco.MjData(self.model)
        self.steps = 0
        self.released_step: int | None = None
        self.fell_step: int | None = None
        self._kicks = kicks
        self._kick_random = np.random.default_rng((seed, 0))
        self._sensors = [_Sensor(index, seed) for index in range(len(STREAMS))]
        self._kick_from = 0
        self._kick_newtons = 0.0
        mujoco.mj_forward(self.model, self.data)

    @property
    def now_ns(self) -> int:
        """Simulated time."""
        return self.steps * STEP_NS

    @property
    def state(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Position, angle, velocity, rate: what nobody but the teacher may see."""
        return np.concatenate((self.data.qpos, self.data.qvel))

    @property
    def stood_ns(self) -> int:
        """Time that the pole has stood since its release (until it fell)."""
        if self.released_step is None:
            return 0
        end = self.steps if self.fell_step is None else self.fell_step
        return (end - self.released_step) * STEP_NS

    def release(self) -> None:
        """Open the fixture; kicks begin."""
        self.data.eq_active[:] = 0
        self.released_step = self.steps
        self._plan_kick(FIRST_KICK_MS)

    def step(self, force: float) -> list[Reading]:
        """Apply ``force`` (N) for one millisecond; returns what the sensors captured before it."""
        mujoco.mj_step1(self.model, self.data)  # sensors of the present state
        samples = [s for sensor in self._sensors if (s := sensor.read(self)) is not None]
        self.data.ctrl[0] = force if self.released_step is not None else 0.0
        self._push()
        mujoco.mj_step2(self.model, self.data)
        self.steps += 1
        if self.released_step is not None and self.fell_step is None and self._is_down():
            self.fell_step = self.steps
        return samples

    def _push(self) -> None:
        """Apply the kick of this step to the pole's tip: a force along x and its torque."""
        into = self.steps - self._kick_from
        active = self._kicks and self.released_step is not None and 0 <= into < KICK_STEPS
        force = self._kick_newtons if active else 0.0
        arm = self.data.sensordata[8:11] - self.data.xipos[2]
        self.data.xfrc_applied[2, 0] = force
        self.data.xfrc_applied[2, 4] = force * arm[2]
        if active and into == KICK_STEPS - 1:
            self._plan_kick(KICK_EVERY_MS)

    def _plan_kick(self, within_ms: tuple[int, int]) -> None:
        self._kick_from = self.steps + int(self._kick_random.integers(*within_ms))
        impulse = self._kick_random.uniform(KICK_MIN_N_S, KICK_MAX_N_S)
        sign = self._kick_random.choice((-1.0, 1.0))
        self._kick_newtons = sign * impulse / (KICK_STEPS * STEP_NS * 1e-9)

    def _is_down(self) -> bool:
        position, angle = self.data.qpos
        return bool(abs(angle) > FALL_ANGLE_RAD or abs(position) > FALL_POSITION_M)


class _Sensor:
    """When one stream's next capture is due, and its noise, drawn in blocks."""

    def __init__(self, index: int, seed: int) -> None:
        self._index = index
        self._stream = STREAMS[index]
        self._columns = _COLUMNS[self._stream.name]
        self._random = np.random.default_rng((seed, 1 + index))
        self._captures = 0
        self._due_step = 0
        self._last_stamp_ns = -(10**18)
        self._draw()

    def read(self, pole: CartPole) -> Reading | None:
        """The sample captured in this step, if one is due."""
        if pole.steps < self._due_step:
            return None
        k = self._captures % _NOISE_BLOCK
        if k == 0:
            self._draw()
        values = (pole.data.sensordata[self._columns] + self._noise[k]).astype(np.float32)
        # Jitter must not turn two stamps around: a sensor's clock never goes back.
        stamp_ns = max(pole.now_ns + int(self._jitter_ns[k]), self._last_stamp_ns + 1)
        self._last_stamp_ns = stamp_ns
        self._captures += 1
        ideal_ms = self._captures * self._stream.period_ms
        self._due_step = max(pole.steps + 1, round(ideal_ms + self._wander_ms[k]))
        return Reading(self._index, stamp_ns, values)

    def _draw(self) -> None:
        shape = (_NOISE_BLOCK, len(self._columns))
        self._noise = self._random.normal(0.0, self._stream.noise, shape)
        self._jitter_ns = self._random.normal(0.0, STAMP_JITTER_NS, _NOISE_BLOCK)
        wander = self._stream.wander_ms
        self._wander_ms = self._random.uniform(-wander, wander, _NOISE_BLOCK)
