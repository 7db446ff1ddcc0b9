from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

pytest.importorskip("mcap")

from mcap.reader import make_reader
from mcap.records import Channel, Chunk, ChunkIndex, DataEnd, Header, Message, Schema, Statistics
from mcap.stream_reader import StreamReader
from pipeline_in_process import NewestValues, PipelineInProcess, small_config
from recording_files import with_camera
from robot_rig import MS, file_size_limit, make_chunk, make_config, make_rows, wait_until

from ppstream.config.schema import PipelineConfig, RecordConfig
from ppstream.core.clock import now_ns
from ppstream.core.errors import ConfigError
from ppstream.ingest.rows import RowInput
from ppstream.ingest.sources import RecordedSource
from ppstream.ingest.synthetic import SyntheticSource
from ppstream.pipeline.pacing import OnSample, Scheduled
from ppstream.recording.item_queue import ItemQueue
from ppstream.recording.items import LoggedLine, SamplesItem
from ppstream.recording.load import load_recording
from ppstream.recording.mcap_schema import Body, json_schema, parse_topic, topic
from ppstream.recording.mcap_writer import RecordFile, open_recorder
from ppstream.recording.recorder import Recorder

WINDOWS = 150


def recording_to(path: Path, config: PipelineConfig, **more: Any) -> PipelineConfig:
    return msgspec.structs.replace(config, record=RecordConfig(file=str(path), **more))


def begin(config: PipelineConfig) -> Recorder:
    recorder = open_recorder(config, "run")
    assert recorder is not None
    return recorder


class Restless(SyntheticSource):
    """Lively input: now and then a sample comes twice, or the robot begins a new episode."""

    drains = 0

    def __init__(self, config: PipelineConfig, row: RowInput) -> None:
        super().__init__(config, row, seed=1, start_ns=now_ns())
        self.row = row

    def drain(self, now_ns: int) -> int:
        samples = super().drain(now_ns)
        self.drains += 1
        ring = self.row.rings["joints"]
        if self.drains % 50 == 20 and ring.count:
            stamps = np.array([ring.newest_ns - MS, ring.newest_ns])
            ring.append(stamps, np.ones((2, 3), np.float32), now_ns)
        if self.drains % 200 == 100:
            self.row.new_episode()
        return samples


def live_run(path: Path, folder: Path) -> tuple[PipelineConfig, list[Any]]:
    """A pipelined run at its own pace, recorded; returns the chunks it emitted."""
    config = recording_to(path, small_config())
    with PipelineInProcess(config, NewestValues(), folder) as pipeline:
        rank0 = pipeline.rank0
        recorder = begin(config)
        recorder.tap(pipeline.intake.rows)
        rank0.log.watchers.append(recorder)
        rank0.stage_a.recorder = recorder
        rank0.enter(
            "ready",
            intake=pipeline.intake,
            source=Restless(config, pipeline.intake.rows[0]),
            pacing=OnSample(pipeline.intake.rows, "imu"),
            emitter=recorder.emitter(pipeline.collector),
        )
        rank0.run(WINDOWS)
        rank0.log.event("fault", stage="B", text="made up")
        rank0.log.flush()
        recorder.close()
        statistics = recorder.recording.statistics()
        assert (statistics.dropped, statistics.waiting, statistics.failure) == (0, 0, "")
    return config, pipeline.collector.chunks


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PipelineConfig, list[Any]]:
    folder = tmp_path_factory.mktemp("recorded")
    path = folder / "run.mcap"
    return path, *live_run(path, folder)


def bodies(path: Path, suffix: str) -> list[dict[str, Any]]:
    with path.open("rb") as file:
        messages = make_reader(file).iter_messages()
        return [json.loads(m.data) for _, channel, m in messages if channel.topic.endswith(suffix)]


def test_a_recorded_run_gives_its_actions_again_bit_for_bit(
    recorded: tuple[Path, PipelineConfig, list[Any]], tmp_path: Path
) -> None:
    path, config, chunks = recorded
    assert len(chunks) > WINDOWS / 2
    shape = msgspec.structs.replace(config.pipeline, windows="scheduled")
    config = msgspec.structs.replace(config, pipeline=shape)
    slow = NewestValues(lambda call: time.sleep(0.25) if call == 20 else None)  # beyond the lease
    with PipelineInProcess(config, slow, tmp_path, inline=True) as pipeline:
        source = RecordedSource(path, config, pipeline.intake.rows, None)
        pipeline.enter(source, Scheduled(source))
        pipeline.rank0.run()
        source.close()
    found = pipeline.collector.chunks
    named = [window["seq"] for window in bodies(path, "/windows")]  # where the robot was present
    assert len(found) == len(named) > WINDOWS / 2
    again = {named[seq]: (end_ns, values.tobytes()) for _, seq, end_ns, values in found}
    assert np.unique([chunk[3] for chunk in chunks]).size > 500
    for _, seq, end_ns, values in chunks:
        assert again[seq] == (end_ns, values.tobytes()), f"window {seq}"
    resets = bodies(path, "/resets")
    assert {reset["reason"] for reset in resets} >= {"new_episode"}


def test_the_recording_holds_what_was_received_cut_emitted_and_went_wrong(
    recorded: tuple[Path, PipelineConfig, list[Any]],
) -> None:
    path, _, chunks = recorded
    actions = bodies(path, "/actions")
    assert len(actions) == len(chunks)
    for said, (_, seq, end_ns, values) in zip(actions, chunks, strict=True):
        assert (said["seq"], said["window_end_ns"], said["dropped"]) == (seq, end_ns, "")
        assert np.float32(said["actions"]).tobytes() == values.tobytes()
    seqs = [window["seq"] for window in bodies(path, "/windows")]
    assert {said["seq"] for said in actions} <= {*seqs} <= {*range(WINDOWS)}
    assert seqs == sorted(seqs)
    batches = bodies(path, "/samples/joints")
    for batch in batches:
        n = len(batch["stamps_ns"])
        assert len(batch["values"]) == n * batch["dim"]
        assert batch["newest"] == batch["values"][-batch["dim"] :]
        assert max(batch["received_ns"]) - min(batch["received_ns"]) < 20 * MS
    stamps = [stamp for batch in batches for stamp in batch["stamps_ns"]]
    assert len(set(stamps)) < len(stamps)  # what came twice is there twice
    events = bodies(path, "/events")
    fault = next(event for event in events if event["name"] == "fault")
    assert (fault["text"], fault["fields"]["stage"]) == ("made up", "B")
    dropped = len([event for event in events if event["name"] == "drop"])
    assert dropped + len(chunks) == WINDOWS


def doctor(path: Path) -> list[str]:
    """What ``mcap doctor --strict-message-order`` objects to, after reading with all checksums."""
    objections = []
    schemas: set[int] = set()
    channels: dict[int, str] = {}
    newest_ns, messages, chunks_said = 0, 0, -1
    indices = []
    with path.open("rb") as file:
        records = [*StreamReader(file, validate_crcs=True).records]
    for record in records:
        if isinstance(record, Schema):
            schemas.add(record.id)
            if record.id == 0 or record.encoding != "jsonschema":
                objections.append(f"schema {record.id} {record.encoding}")
        elif isinstance(record, Channel):
            channels[record.id] = record.topic
            if record.schema_id not in schemas:
                objections.append(f"channel {record.topic} before its schema")
        elif isinstance(record, Message):
            messages += 1
            if record.channel_id not in channels:
                objections.append("a message before its channel")
            if record.log_time < newest_ns:
                objections.append(f"{channels[record.channel_id]} goes back in time")
            newest_ns = record.log_time
        elif isinstance(record, ChunkIndex):
            indices.append(record)
        elif isinstance(record, Statistics):
            if (record.message_count, record.channel_count) != (messages, len(channels)):
                objections.append(f"statistics say {record.message_count} messages")
            chunks_said = record.chunk_count
    if not isinstance(records[0], Header) or not any(isinstance(r, DataEnd) for r in records):
        objections.append("no header or no end of data")
    with path.open("rb") as file:
        chunks = [r for r in StreamReader(file, emit_chunks=True).records if isinstance(r, Chunk)]
    times = [(chunk.message_start_time, chunk.message_end_time) for chunk in chunks]
    if chunks_said != len(chunks):
        objections.append(f"statistics say {chunks_said} chunks, there are {len(chunks)}")
    if times != [(index.message_start_time, index.message_end_time) for index in indices]:
        objections.append("chunks and their index disagree")
    return objections


def test_a_recording_passes_the_rules_of_the_format(
    recorded: tuple[Path, PipelineConfig, list[Any]],
) -> None:
    assert doctor(recorded[0]) == []


def test_late_news_and_a_gap_of_samples_leave_the_file_in_order(tmp_path: Path) -> None:
    def samples(first: int, at_ns: int) -> SamplesItem:
        stamps = np.arange(first, first + 2, dtype=np.int64)
        return SamplesItem(
            "arm", "imu", first, first + 2, stamps.tobytes(), bytes(2 * 2 * 8), at_ns
        )

    path = tmp_path / "run.mcap"
    file = RecordFile(path, make_config(), "run")
    file.write([samples(0, 50 * MS), samples(2, 51 * MS), samples(9, 52 * MS)])
    file.write([LoggedLine(30 * MS, {"kind": "event", "name": "drop", "reason": "expired"})])
    file.close()
    assert doctor(path) == []
    batches = bodies(path, "/imu")
    assert [(batch["first"], len(batch["stamps_ns"])) for batch in batches] == [(0, 4), (9, 2)]
    with path.open("rb") as opened:
        times = [(m.log_time, m.publish_time) for _, _, m in make_reader(opened).iter_messages()]
    assert times[-1] == (52 * MS, 30 * MS)  # told late, and when it had happened


@pytest.mark.parametrize("body", Body.__args__, ids=lambda body: body.__name__)
def test_schemas_are_plain_enough_for_viewers(body: type[Any]) -> None:
    schema = json.loads(json_schema(body))
    assert schema["type"] == "object"
    text = json.dumps(schema)
    assert "$ref" not in text
    assert "anyOf" not in text
    for field in schema["properties"].values():
        assert field["type"] in ("integer", "number", "string", "array", "object")
        assert field.get("items", {}).get("type") != "array"


def test_topics_name_robot_kind_and_stream() -> None:
    for parts in (
        ("arm", "samples", "hand/joints"),
        ("arm", "cameras", "hand/top"),
        ("left/arm", "windows", ""),
    ):
        assert parse_topic(topic(*parts)) == parts
    assert parse_topic("/events") is None
    assert parse_topic("/arm/windows/else") is None


def test_samples_that_are_not_finite_come_back_as_such(tmp_path: Path) -> None:
    config = recording_to(tmp_path / "run.mcap", make_config())
    rows = make_rows(config)
    rows[0].open(1)
    recorder = begin(config)
    recorder.tap(rows)
    stamps = np.array([5, 9], np.int64) * MS
    values = np.array([[np.nan, 0.1, 3e38], [1, 2, 3]], np.float32)
    rows[0].rings["joints"].append(stamps, values, now_ns())
    recorder.close()
    track = load_recording(tmp_path / "run.mcap").tracks["joints"]
    assert track.values.astype(np.float32).tobytes() == values.tobytes()
    assert track.stamps_ns.tolist() == stamps.tolist()


@pytest.mark.parametrize(
    "names", [("left", "right"), ("openpi-1-127.0.0.1-58672", "openpi-2-127.0.0.1-58674")]
)
def test_a_recording_of_two_robots_asks_whose_samples_are_meant(
    names: tuple[str, str], tmp_path: Path
) -> None:
    config = recording_to(tmp_path / "run.mcap", make_config(rows=2))
    rows = make_rows(config)
    recorder = begin(config)
    recorder.tap(rows)
    for number, row in enumerate(rows):
        row.open(number + 1)
        row.robot = names[number]
        row.rings["imu"].append(np.array([number]), np.full((1, 2), number * 1.0), now_ns())
    recorder.cleared("guest", "session")  # who sent no sample is no choice
    recorder.close()
    with pytest.raises(ConfigError, match=f"want one of {', '.join(names)} in "):
        load_recording(tmp_path / "run.mcap")
    track = load_recording(tmp_path / "run.mcap", robot=names[1]).tracks["imu"]
    assert track.values.tolist() == [[1, 1]]


@pytest.mark.parametrize("robot", [None, "arm0"])
def test_robots_that_are_not_asked_for_take_no_memory(robot: str | None, tmp_path: Path) -> None:
    """A run of many may be larger than the memory."""
    samples = 20_000
    stamps = np.arange(samples, dtype=np.int64)
    item = SamplesItem("", "imu", 0, samples, stamps.tobytes(), bytes(samples * 2 * 8), MS)
    file = RecordFile(tmp_path / "run.mcap", make_config(), "run")
    for number in range(12):
        file.write([item._replace(robot=f"arm{number}")])
    file.close()
    with pytest.raises(ConfigError):
        load_recording(tmp_path / "run.mcap", robot="nobody")  # what is imported and made once
    tracemalloc.start()
    try:
        with suppress(ConfigError):
            load_recording(tmp_path / "run.mcap", robot=robot)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 10 * samples * (2 * 8 + 2 * 8)  # twelve robots' stamps, arrivals and values


def test_no_recording_is_overwritten(tmp_path: Path) -> None:
    config = recording_to(tmp_path / "run.mcap", make_config())
    for _ in range(3):
        begin(config).close()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["run-2.mcap", "run-3.mcap", "run.mcap"]


@pytest.mark.parametrize("_attempt", range(20))
def test_runs_that_begin_at_one_moment_record_to_files_of_their_own(
    tmp_path: Path, _attempt: int
) -> None:
    path, together = tmp_path / "run.mcap", threading.Barrier(8)
    files: list[RecordFile] = []

    def begin_one() -> None:
        together.wait(20)
        files.append(RecordFile(path, make_config(), "run"))

    threads = [threading.Thread(target=begin_one) for _ in range(together.parties)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    for file in files:
        file.close()
    assert len(list(tmp_path.iterdir())) == len(files) == together.parties


def test_without_its_package_the_remedy_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "mcap", None)
    with pytest.raises(ConfigError, match=r"pip install 'ppstream\[record\]'"):
        open_recorder(recording_to(tmp_path / "run.mcap", make_config()), "run")


# ---- a recorder in trouble ------------------------------------------------------------------


class Watched:
    """A pipeline in operation with a recorder, and what makes its file grow fast."""

    def __init__(self, config: PipelineConfig, folder: Path) -> None:
        self._pipeline = PipelineInProcess(config, NewestValues(), folder)
        self._rng = np.random.default_rng(0)
        self.recorder = begin(config)
        self.recorder.tap(self._pipeline.intake.rows)

    def __enter__(self) -> Watched:
        self._pipeline.__enter__()
        self._pipeline.rank0.stage_a.recorder = self.recorder
        self._pipeline.saturate()
        return self

    def __exit__(self, *_: object) -> None:
        self._pipeline.__exit__()

    def record_until(self, condition: Callable[[], object]) -> None:
        """Record more and more; fails after some seconds."""

        def record_more() -> object:
            values = self._rng.normal(size=(500, 3)).astype(np.float32)
            self.recorder.samples("row0", "joints", np.arange(500), values, now_ns())
            return condition()

        wait_until(record_more, seconds=20)

    def assert_control_goes_on(self) -> None:
        chunks = self._pipeline.collector.chunks
        emitted = len(chunks)
        self._pipeline.rank0.run(50)
        assert len(chunks) == emitted + 50


@contextmanager
def stopped_reader(pipe: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A viewer of the pipe that is frozen once it has begun to read."""
    os.mkfifo(pipe)
    script = f"import sys; f = open({str(pipe)!r}, 'rb'); print(f.read(8), flush=True); f.read()"
    reader = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    try:
        yield reader
    finally:
        reader.kill()
        reader.wait()
        assert reader.stdout is not None
        reader.stdout.close()


def test_a_frozen_viewer_costs_parts_of_the_recording_and_nothing_else(tmp_path: Path) -> None:
    pipe = tmp_path / "viewer"
    config = recording_to(pipe, small_config(), queue_mb=0.1)
    with stopped_reader(pipe) as reader, Watched(config, tmp_path) as watched:
        assert reader.stdout is not None
        assert b"MCAP" in reader.stdout.readline()
        reader.send_signal(signal.SIGSTOP)
        watched.record_until(lambda: watched.recorder.recording.statistics().dropped > 10)
        watched.assert_control_goes_on()
        began_ns = now_ns()
        watched.recorder.close()
        assert now_ns() - began_ns < 5_000 * MS
        assert (
            watched.recorder.recording.statistics().failure
            == "the writer did not finish within 2 s"
        )


def test_a_viewer_that_left_ends_the_recording_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pipe = tmp_path / "viewer"
    config = recording_to(pipe, small_config())
    with stopped_reader(pipe) as reader, Watched(config, tmp_path) as watched:
        assert reader.stdout is not None
        assert b"MCAP" in reader.stdout.readline()
        reader.kill()
        watched.record_until(lambda: watched.recorder.recording.statistics().failure)
        before = watched.recorder.recording.statistics().dropped
        watched.assert_control_goes_on()
        watched.recorder.close()
        found = watched.recorder.recording.statistics()
    assert found.failure == "Broken pipe"
    assert found.dropped > before  # and counted
    assert "recording stopped, the run goes on: Broken pipe" in caplog.text


def ends_with_a_record(data: bytes) -> bool:
    """Walk from record to record: magic, then an opcode and a length each."""
    at = 8
    while at < len(data):
        at += 9 + int.from_bytes(data[at + 1 : at + 9], "little")
    return at == len(data)


def test_a_full_disk_ends_the_recording_whole_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = os.statvfs_result((4096, 4096, 1000, 0, 0, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _: full)  # nor is there room for a next part
    file = tmp_path / "run.mcap"
    config = recording_to(file, small_config())
    with Watched(config, tmp_path) as watched, file_size_limit(500_000):
        watched.record_until(lambda: watched.recorder.recording.statistics().failure)
        watched.assert_control_goes_on()
        (told,) = watched.recorder.losses()
        assert told["failure"] == "File too large"
        assert watched.recorder.losses() == []  # nothing came, and nothing would be written
        watched.recorder.close()
    assert watched.recorder.recording.statistics().failure == "File too large"
    assert "recording stopped, the run goes on: File too large" in caplog.text
    assert 250_000 < file.stat().st_size <= 500_000
    assert ends_with_a_record(file.read_bytes())
    track = load_recording(file).tracks["joints"]  # what was written is whole, and readable
    assert len(track.stamps_ns) > 1000
    assert len(track.stamps_ns) % 500 == 0


def test_samples_that_the_recorder_lost_are_told_and_forbid_exact_repeats(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = recording_to(tmp_path / "run.mcap", make_config(), queue_mb=0.004)
    rows = make_rows(config)
    rows[0].open(1)
    written = threading.Event()
    recorder = Recorder(ItemQueue("recording", lambda: opened_late(written, config), 4000))
    recorder.tap(rows)
    for number in range(21):
        if number == 20:
            written.set()
            wait_until(lambda: recorder.recording.statistics().waiting == 0)
        stamps = (np.arange(50) + 50 * number) * MS
        rows[0].rings["joints"].append(stamps, np.ones((50, 3), np.float32), now_ns())
    recorder.close()
    dropped = recorder.recording.statistics().dropped
    assert 0 < dropped < 20
    assert [one.getMessage() for one in caplog.records] == [
        f"recording: loses items, {dropped} so far: the disk, the CPU or the reader is too slow; "
        "make its queue larger",
        f"recording: {dropped} items lost of 21",
    ]
    recording = load_recording(tmp_path / "run.mcap")
    assert recording.lost == {"joints": 50 * dropped}


@pytest.mark.parametrize(("frames", "remedy"), [("raw", "jpeg"), ("jpeg", "none"), ("none", None)])
def test_the_first_loss_is_said_once_with_what_to_set(
    frames: str, remedy: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The file is a pipe that nobody reads yet."""
    pipe = tmp_path / "live"
    os.mkfifo(pipe)
    config = with_camera(make_config(), 4, 6, file=str(pipe), frames=frames, queue_mb=0.004)
    rows = make_rows(config)
    rows[0].open(1)
    recorder = begin(config)
    recorder.tap(rows)
    for number in range(20):
        stamps = (np.arange(50) + 50 * number) * MS
        rows[0].rings["joints"].append(stamps, np.ones((50, 3), np.float32), now_ns())
        recorder.losses()
    reader = threading.Thread(target=pipe.read_bytes)
    reader.start()
    recorder.close()
    reader.join(60)
    first, last = (record.getMessage() for record in caplog.records)
    assert "recording: loses items, 1 so far: " in first
    also = f', or set record.frames = "{remedy}"' if remedy else ""
    assert first.endswith("too slow; raise record.queue_mb (0.004 MB)" + also)
    assert "items lost of" in last


def opened_late(written: threading.Event, config: PipelineConfig) -> Any:
    """A file that opens once something is waiting for it."""
    assert written.wait(60)
    return RecordFile(Path(str(config.record.file)), config, "run")


def test_an_emitter_s_refusals_are_recorded_with_their_reason(tmp_path: Path) -> None:
    class Refusing:
        def emit(self, row: int, chunk: Any) -> str | None:
            return "no_session"

    config = recording_to(tmp_path / "run.mcap", make_config())
    recorder = begin(config)
    recorder.tap(make_rows(config))
    assert recorder.emitter(Refusing()).emit(0, make_chunk(3)) == "no_session"
    assert recorder.emitter(None).emit(0, make_chunk(4)) is None
    recorder.close()
    found = bodies(tmp_path / "run.mcap", "/actions")
    assert [(said["seq"], said["dropped"]) for said in found] == [(3, "no_session"), (4, "")]
