"""Pipelined output equals its unpipelined twin's, across real processes and every link."""

import os
from pathlib import Path

import numpy as np
import pytest
from ranks import CONFIG, Ranks
from recorded_runs import played
from recording_files import made_recording

from ppstream.recording.load import load_recording

pytestmark = pytest.mark.multirank

ECHO = (
    "policy.target=ppstream_stages.echo:build",
    "policy.options={steps=8, dim=5, horizon=4, action_dim=2}",
    "pipeline.windows=scheduled",
    "service.duration_s=none",
)


def actions_of(root: Path, recording: Path, *overrides: str, world_size: int = 2) -> dict:
    return played(root, recording, *ECHO, *overrides, ranks=world_size)[0]


def assert_identical(one: dict, other: dict) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert one[name].tobytes() == other[name].tobytes(), name


@pytest.fixture(scope="module")
def twin(tmp_path_factory):
    """A recording, and what the unpipelined twin makes of it."""
    folder = tmp_path_factory.mktemp("twin")
    recording = made_recording(folder / "recording.npz")
    return recording, actions_of(folder / "inline", recording, world_size=1)


@pytest.mark.parametrize(
    ("link", "threads"), [("host", "serial"), ("host", "split"), ("gloo", "serial")]
)
def test_two_ranks_give_the_twin_s_actions_bit_for_bit(link, threads, twin, tmp_path):
    recording, expected = twin
    assert len(expected["actions"]) > 200
    assert np.unique(expected["actions"]).size > 500
    settings = (f"link.kind={link}", f"pipeline.threads={threads}")
    found = actions_of(tmp_path / "ranks", recording, *settings)
    assert_identical(expected, found)


@pytest.mark.skipif(
    "PPSTREAM_TEST_DATA" not in os.environ, reason="PPSTREAM_TEST_DATA names no recordings"
)
def test_recorded_1_khz_arm_gives_the_twin_s_actions_bit_for_bit(tmp_path):
    whole = load_recording(Path(os.environ["PPSTREAM_TEST_DATA"]) / "franka_fr3_1khz.npy")
    recording = tmp_path / "part.npz"  # 0.7 s of it, with its gaps and repeats
    tracks = {name: whole.tracks[name] for name in ("q", "tau")}
    stamps = {f"{name}.stamps_ns": track.stamps_ns[:700] for name, track in tracks.items()}
    values = {f"{name}.values": track.values[:700] for name, track in tracks.items()}
    np.savez(recording, **stamps, **values)
    config = tmp_path / "franka.toml"
    head, _, rest = CONFIG.read_text().partition("[[streams]]")
    streams = "".join(
        f'[[streams]]\nname = "{name}"\ndim = {dim}\nrate_hz = 1000\ninterpolation = "{mode}"\n\n'
        for name, dim, mode in (("q", 7, "linear"), ("tau", 7, "previous"))
    )
    config.write_text(head + streams + "[window]" + rest.partition("[window]")[2])
    wide = "policy.options={steps=8, dim=14, horizon=4, action_dim=2}"
    inline = actions_of_file(tmp_path / "inline", config, recording, wide, world_size=1)
    pipelined = actions_of_file(tmp_path / "ranks", config, recording, wide, world_size=2)
    assert len(inline["actions"]) > 300
    assert_identical(inline, pipelined)


def actions_of_file(
    root: Path, config: Path, recording: Path, options: str, *, world_size: int
) -> dict:
    asked = (*ECHO, options)
    return played(root, recording, *asked, ranks=world_size, limit_s=80, config=config)[0]


def test_bring_up_on_a_recording_repeats_it(tmp_path):
    recording = made_recording(tmp_path / "recording.npz")  # 0.5 s, shorter than bring-up
    source = ("bringup.source=recording", f"bringup.recording={recording}")
    with Ranks(tmp_path / "logs", *source, "bringup.envelopes=300") as ranks:
        assert ranks.wait() == [0, 0], ranks.output()
        ends_ns = [line["window_end_ns"] for line in ranks.envelopes("bring-up")]
    assert len(ends_ns) >= 220
    assert max(ends_ns) - min(ends_ns) > 10**9  # stage B alone takes 1.1 s
