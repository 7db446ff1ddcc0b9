"""Service: what a run serves once it is ready: robots that connect, or a recording instead.

Robots are admitted from the start and told the phase; they hold until *ready*. With the embedded
default a simulated robot is started as a process of its own, and connects like any other.
"""

from __future__ import annotations

import logging
import subprocess
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ppstream.analysis.records import GATEWAY
from ppstream.config.schema import DemoConfig, PipelineConfig
from ppstream.control.peer_process import bound_command, environment_to_import
from ppstream.core.clock import now_ns
from ppstream.core.errors import ConfigError
from ppstream.core.phases import SERVING
from ppstream.ingest.intake import build_intake
from ppstream.ingest.sensor_health import DEGRADED, SensorChange, SensorState
from ppstream.ingest.sources import RecordedSource, Source
from ppstream.observe.run_folder import ROBOT_STORY, Run
from ppstream.pipeline.child_process import ChildProcess, start_gateway, start_view
from ppstream.pipeline.loop import Rank0Loop
from ppstream.pipeline.pacing import Pacing, Scheduled, service_pacing
from ppstream.recording.action_file import ActionFile
from ppstream.recording.mcap_writer import open_recorder
from ppstream.sessions.server import Sessions

if TYPE_CHECKING:
    from ppstream.recording.recorder import Recorder
    from ppstream.recording.recording import Recording
    from ppstream.wire.robot_messages import Emitter

logger = logging.getLogger("ppstream")

ROBOT_END_LIMIT_S: Final = 2.0  # twice; the policy rank waits for ``liveness.drain_s`` and 2 more


class Service:
    """A context manager: robots may connect inside it; ``run`` is the phase *ready*.

    ``recording``: what ``served_recording`` has read; None: ``run`` reads it.
    """

    def __init__(
        self,
        config: PipelineConfig,
        run: Run,
        rank0: Rank0Loop,
        recording: Recording | None = None,
    ) -> None:
        self.config = config
        self._recording = recording
        self.intake = build_intake(config, rank0.blind_reads)
        self.sessions: Sessions | None = None
        self._actions: ActionFile | None = None
        self._recorder: Recorder | None = None
        self._run = run
        self._rank0 = rank0
        self._robot: subprocess.Popen[bytes] | None = None
        self._gateway: ChildProcess | None = None
        self._view: ChildProcess | None = None

    def __enter__(self) -> Service:
        with ExitStack() as stack:
            stack.callback(self._close)
            self._start()
            stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def _start(self) -> None:
        service = self.config.service
        view_fd = None
        if self.config.view.port is not None:
            self._view, view_fd = start_view(self.config)
        self._recorder = open_recorder(self.config, self._run.run_id, view_fd)
        if self._recorder is not None:
            self._recorder.tap(self.intake.rows)
            self._rank0.log.watchers.append(self._recorder)
        if service.recording is None and service.endpoint is not None:
            self.sessions = Sessions(self.config, self.intake.rows)
            self.sessions.set_wake(self._rank0.waiter.wake)
            self._rank0.reports = self.sessions.reports
            self.sessions.requests.attach(self._rank0.instruct, self._rank0.log.event)
            self._rank0.on_phase.append(self.sessions.set_phase)
            logger.info("robots connect to %s", self.sessions.endpoint)
            if self.config.demo is not None:
                self._robot = self._start_robot(self.config.demo, self.sessions.endpoint)
            if self.config.gateway:
                endpoint = self.sessions.endpoint
                self._gateway = start_gateway(self.config, self._run, endpoint, self._log_gateway)
        if service.actions_file is not None:
            self._actions = ActionFile(Path(service.actions_file), len(self.config.actions.names))
        for child in filter(None, (self._gateway, self._view)):
            child.check_started()  # before bring-up: a port that is taken ends the run at once

    def _close(self) -> None:
        """End what there is, from the last to the first: files, then processes that may stand.

        A rank whose peer is gone leaves in a second, wherever this is.
        """
        with ExitStack() as stack:
            stack.callback(self._end_robot)
            for child in (self._view, self._gateway):
                if child is not None:
                    stack.callback(child.close)
            if self._actions is not None:
                stack.callback(self._actions.close)
            if self._recorder is not None:
                stack.callback(self._close_recorder, self._recorder)
            if self.sessions is not None:
                stack.callback(self.sessions.close)
                self.sessions.set_phase("stopped")

    def _close_recorder(self, recorder: Recorder) -> None:
        self._rank0.stage_a.recorder = None
        self._rank0.log.flush()  # what it still has to tell
        for lost in recorder.close():
            self._rank0.log.event("recorder", **lost)

    def run(self) -> None:
        """Serve until a stop is asked for, the recording ends, or ``duration_s`` is over."""
        if self._robot is not None and self._robot.poll() is not None:
            raise ConfigError(
                [
                    f"demo.robot: it ended with code {self._robot.returncode} before the run was "
                    "ready; its message stands above (mujoco comes with 'ppstream[demo]')"
                ]
            )
        if self._recorder is not None:
            self._rank0.on_second.append(self._log_losses)
        rank0, duration_s = self._rank0, self.config.service.duration_s
        source = self._source()
        state = SensorState(
            self.config,
            self.intake,
            self._log_sensor,
            self._on_degraded,
            lambda: rank0.unread_ns,
        )
        if self.sessions is not None:  # a recording may be fed at any speed
            rank0.on_second.append(state.check)
        rank0.cut("ready")
        rank0.stage_a.recorder = self._recorder
        rank0.enter(
            "ready",
            intake=self.intake,
            source=source,
            pacing=self._pacing(source),
            emitter=self._emitter(),
        )
        over = threading.Timer(
            duration_s or threading.TIMEOUT_MAX, rank0.request_stop, ("service.duration_s is over",)
        )
        over.daemon = True
        if duration_s is not None:
            over.start()
        try:
            rank0.run()
        finally:
            over.cancel()
        if rank0.phase in SERVING:  # else the loop said so while results were still owed
            rank0.change_phase("draining")
        rank0.write_ledger()

    def _log_losses(self, _now_ns: int) -> None:
        assert self._recorder is not None, "called with one alone"
        for lost in self._recorder.losses():
            self._rank0.log.event("recorder", **lost)

    def _log_gateway(self, how: str, again_s: float | None) -> None:
        more = {} if again_s is None else {"again_in_s": again_s}
        self._rank0.log.event(GATEWAY, gateway=how, **more)

    def _log_sensor(self, change: SensorChange) -> None:
        robot = self.intake.rows[change.row].robot
        why = change.why and f": {change.why}"
        logger.info(
            "%s of %s: %s, was %s%s", change.stream, robot, change.condition, change.before, why
        )
        self._rank0.log.event("sensor", robot=robot, **change._asdict())
        if self.sessions is not None:
            line = f"{change.stream}: {change.condition}{why}"
            told = line if change.condition in DEGRADED else ""
            self.sessions.set_degraded(change.row, change.stream, told)

    def _on_degraded(self, is_degraded: bool) -> None:  # noqa: FBT001 - a callback's only value
        self._rank0.log.event("degraded", degraded=is_degraded)
        if self.sessions is not None and self._rank0.phase == "ready":  # else it stays degraded
            self.sessions.set_phase("degraded" if is_degraded else "ready")

    def _source(self) -> Source:
        recording = self.config.service.recording
        if recording is not None:
            speed = None if self.config.pipeline.windows == "scheduled" else 1.0
            rows, read = self.intake.rows, self._recording
            return RecordedSource(recording, self.config, rows, speed, recording=read)
        return self.sessions or Silence()

    def _emitter(self) -> Emitter | None:
        emitter = self._actions or self.sessions
        return emitter if self._recorder is None else self._recorder.emitter(emitter)

    def _pacing(self, source: Source) -> Pacing:
        if isinstance(source, RecordedSource) and source.scheduled:
            return Scheduled(source)
        rank0 = self._rank0
        return service_pacing(self.config, self.intake.rows, now_ns(), lambda: rank0.finished)

    def _start_robot(self, demo: DemoConfig, endpoint: str) -> subprocess.Popen[bytes]:
        settings: dict[str, object] = {"endpoint": endpoint}
        settings["report"] = self._run.directory / "robot.json"
        settings |= {"extra-delay-ms": demo.extra_delay_ms, "seed": demo.seed}
        options = [part for key, value in settings.items() for part in (f"--{key}", str(value))]
        with (self._run.directory / ROBOT_STORY).open("w") as story:
            return subprocess.Popen(
                bound_command(demo.robot, *options), stdout=story, env=environment_to_import()
            )

    def _end_robot(self) -> None:
        """The robot leaves by itself when the run drains; it is made to after a moment."""
        if self._robot is None:
            return
        try:
            self._robot.wait(ROBOT_END_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._robot.terminate()
            try:
                self._robot.wait(ROBOT_END_LIMIT_S)
            except subprocess.TimeoutExpired:
                self._robot.kill()


class Silence:
    """A source without robots: nothing will come, and it never ends."""

    fds: tuple[int, ...] = ()
    exhausted = False

    def drain(self, now_ns: int) -> int:
        return 0

    def next_due_ns(self) -> int | None:
        return None
