"""See a recorded cart-pole: a GIF of each run, with the age of its actions below.

``python tools/robot_view.py two.mcap four.mcap --label "queue of 2" --label "queue of 4" --gif G``
draws recordings of the demo (``--set record.file=two.mcap``) beside one another. ``--run 2 4``
first makes them: two ranks, pacing free, stage B 25 ms, and a queue as deep as each number says;
``--lockstep 2 4`` makes the same without a clock, so that no other load can spoil them.
The age of an action chunk is counted from the end of its window to its decoding, on the robot's
clock; red ones came too late to execute: the last of their steps was past. Needs
``ppstream[demo,record]`` and Pillow.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))

import msgspec
import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageColor, ImageDraw, ImageFont
from real_runs import RankPair, ending_cleanly
from robot_view_lockstep import record_lockstep

from ppstream.core.clock import NS_PER_MS, NS_PER_S
from ppstream.core.errors import ConfigError, ExitCode, PpstreamError
from ppstream.recording.mcap_messages import EncodedMessage
from ppstream.recording.mcap_reader import read_mcap
from ppstream_stages.cartpole.layout import ACTION_DT_NS, FALL_ANGLE_RAD, FALL_POSITION_M, HORIZON

STREAM: Final = "encoder"  # cart position m, pole angle rad
POLE_M: Final = 0.45
FRAME_MS: Final = 50
WIDTH, SCENE, CHART = 1280, 190, 190  # pixels: of all runs; a run's scene, its chart
POLE: Final = 80  # pixels
METRE: Final = POLE / POLE_M
MARGIN: Final = 12  # pixels
RAIL_Y: Final = 150
FLOOR_RAD: Final = np.pi / 2  # a pole that has fallen so far lies on the rail's height
AGE_MAX_MS: Final = 160
SPAN_NS: Final = HORIZON * ACTION_DT_NS  # from a window's end to the last step of its actions
PAPER, INK, GREY, FAINT = "#ffffff", "#222222", "#bbbbbb", "#eeeeee"
BLUE, RED, WOOD = "#2266cc", "#cc3322", "#b07030"
FONT: Final = ImageFont.load_default(20)
SMALL_FONT: Final = ImageFont.load_default(16)
RUN: Final = (  # settings of the demo for --run
    "pipeline.pacing=free",
    "pipeline.threads=split",
    "policy.target=robot_view_policy:build",
    "policy.options={takes_ms=25}",
    "actions.lease_ms=400",  # or bring-up would end the run with the deep queue
    "bringup.envelopes=100",
    "bringup.accept=['NOTHING_TO_HIDE']",
)


class View(NamedTuple):
    """Series to draw of one recording; times in s since its first sample."""

    label: str
    at_s: NDArray[np.float64]  # [n], of positions and angles
    states: NDArray[np.float64]  # [n, 2]
    answered_s: NDArray[np.float64]  # [m], of ages
    ages_ms: NDArray[np.float64]
    usable: NDArray[np.bool_]  # [m], false: the last step was past

    @property
    def fell_s(self) -> float | None:
        """When the pole was down, or None."""
        down = np.abs(self.states) > (FALL_POSITION_M, FALL_ANGLE_RAD)
        found = np.flatnonzero(down.any(axis=1))
        return float(self.at_s[found[0]]) if found.size else None

    def state(self, now_s: float) -> tuple[float, float]:
        """Position and angle to draw; a pole that has come down stays there."""
        place = min(int(self.at_s.searchsorted(now_s)), len(self.at_s) - 1)
        position, angle = self.states[place]
        lying = np.flatnonzero(np.abs(self.states[: place + 1, 1]) > FLOOR_RAD)
        if lying.size:
            angle = np.copysign(FLOOR_RAD, self.states[lying[0], 1])
        return float(position), float(angle)


def main(argv: Sequence[str] | None = None) -> int:
    options = _arguments(argv)
    try:
        with ending_cleanly(), tempfile.TemporaryDirectory(prefix="ppstream-view-") as folder:
            files, labels = options.files, options.label
            for depth in options.run:
                files.append(record(Path(folder), depth, options.seconds))
                labels.append(f"queue of {depth}")
            for depth in options.lockstep:
                file = Path(folder) / f"lockstep-{depth}.mcap"
                files.append(record_lockstep(file, depth, options.seconds))
                labels.append(f"queue of {depth}")
            if not files:
                raise ConfigError(["robot_view: no recording named, want FILE or --run 2 4"])
            names = [*labels, *(file.stem for file in files[len(labels) :])]
            views = [read_view(file, name) for file, name in zip(files, names, strict=False)]
        save(views, options.gif)
    except PpstreamError as error:
        print(f"robot_view: {error}", file=sys.stderr)
        return int(error.exit_code)
    for view in views:
        print(describe(view))
    print(f"{options.gif}: {options.gif.stat().st_size / 1000:.0f} kB")
    return 0


def record(folder: Path, depth: int, seconds: float) -> Path:
    """Run the demo with so deep a queue; returns its recording.

    Raises:
        PpstreamError: it did not become ready.
    """
    logs = folder / str(depth)
    logs.mkdir()
    own = (
        f"pipeline.d_in={depth}",
        f"service.duration_s={seconds}",
        f"service.endpoint=unix://{logs}/socket/robots",
    )
    file = logs / "run.mcap"
    with RankPair(logs, "demo", (*RUN, *own, f"record.file={file}")) as ranks:
        if ranks.wait() != ExitCode.DRAINED:
            raise PpstreamError(
                f"a run with a queue of {depth} did not end well:\n{ranks.output()}"
            )
    return file


def read_view(path: Path, label: str) -> View:
    """Samples of the encoder, and how old each window's actions were when they were decoded.

    Raises:
        ConfigError: it is no recording of a cart-pole.
    """
    messages = (found for found in read_mcap(path) if isinstance(found, EncodedMessage))
    bodies = [(m.topic, m.happened_ns, msgspec.json.decode(m.data)) for m in messages]
    batches = [body for topic, _, body in bodies if topic.endswith(f"/samples/{STREAM}")]
    if not batches:
        raise ConfigError([f"{path}: no samples of {STREAM!r}, want a recording of the demo"])
    stamps, received, values = (
        np.array([one for batch in batches for one in batch[key]])
        for key in ("stamps_ns", "received_ns", "values")
    )
    offset_ns = int((received - stamps).min())  # the robot's clock, as rank 0's
    answers = sorted(_answers(bodies, offset_ns))
    answered, ages = (np.array(column) for column in zip(*answers, strict=True))
    began_ns = int(stamps[0]) + offset_ns
    return View(
        label,
        (stamps - stamps[0]) / NS_PER_S,
        values.astype(np.float64).reshape(-1, 2),
        (answered - began_ns) / NS_PER_S,
        ages / NS_PER_MS,
        ages <= SPAN_NS,
    )


def _answers(
    bodies: list[tuple[str, int, dict[str, Any]]], offset_ns: int
) -> Iterator[tuple[int, int]]:
    """When each window's actions were ready, on rank 0's clock, and how old they were."""
    ends = {
        (body["epoch"], body["seq"]): body["window_end_ns"] + offset_ns
        for topic, _, body in bodies
        if topic.endswith("/windows")
    }
    for topic, at_ns, body in bodies:
        fields = body.get("fields", body)
        is_drop = topic == "/events" and body["name"] == "drop" and fields["reason"] == "expired"
        if is_drop or topic.endswith("/actions"):
            end_ns = ends.get((fields["epoch"], fields["seq"]))
            if end_ns is not None:
                yield at_ns, at_ns - end_ns


def save(views: Sequence[View], path: Path) -> None:
    """All frames, in real time."""
    end_s = max(float(view.at_s[-1]) for view in views)
    count = int(end_s * 1000 / FRAME_MS)
    frames = [draw(views, number * FRAME_MS / 1000, end_s) for number in range(count)]
    palette = _palette()
    dither = Image.Dither.NONE
    first, *rest = (frame.quantize(palette=palette, dither=dither) for frame in frames)
    first.save(path, save_all=True, append_images=rest, duration=FRAME_MS, loop=0, optimize=True)


def _palette() -> Image.Image:
    """One for all frames: the inks, and greys for the edges of letters."""
    inks = [ImageColor.getrgb(ink)[:3] for ink in (PAPER, INK, GREY, BLUE, RED, WOOD, FAINT)]
    greys = [(level,) * 3 for level in range(50, 250, 22)]
    palette = Image.new("P", (1, 1))
    palette.putpalette([part for color in (*inks, *greys) for part in color])
    return palette


def draw(views: Sequence[View], now_s: float, end_s: float) -> Image.Image:
    """One frame: the runs beside one another."""
    image = Image.new("RGB", (WIDTH, SCENE + CHART), PAPER)
    edges = [round(number * WIDTH / len(views)) for number in range(len(views) + 1)]
    for view, (left, right) in zip(views, pairwise(edges), strict=True):
        panel = Image.new("RGB", (right - left, SCENE + CHART), PAPER)
        pen = ImageDraw.Draw(panel)
        _scene(pen, view, now_s, panel.width)
        _chart(pen, view, now_s, end_s, panel.width)
        if left:
            pen.line((0, 0, 0, panel.height), GREY)
        image.paste(panel, (left, 0))
    return image


def _scene(pen: ImageDraw.ImageDraw, view: View, now_s: float, width: int) -> None:
    position, angle = view.state(now_s)
    way = width / 2 - MARGIN - POLE  # a cart that rolls away stays in sight, its pole, too
    x, y = width / 2 + min(max(position * METRE, -way), way), RAIL_Y
    tip = (x + np.sin(angle) * POLE, y - np.cos(angle) * POLE)
    pen.line((MARGIN, y + 13, width - MARGIN, y + 13), GREY, 3)
    pen.rectangle((x - 20, y - 9, x + 20, y + 11), INK)
    pen.line((x, y - 6, tip[0], tip[1] - 6), WOOD, 7)
    pen.text((MARGIN, 8), view.label, INK, FONT)
    if view.fell_s is not None and now_s >= view.fell_s:
        pen.text((width - MARGIN, 8), f"fell after {view.fell_s:.1f} s", RED, FONT, anchor="ra")
    else:
        pen.text((width - MARGIN, 8), f"{now_s:.1f} s", INK, FONT, anchor="ra")


def _chart(pen: ImageDraw.ImageDraw, view: View, now_s: float, end_s: float, width: int) -> None:
    """Ages over time; those above the red line came behind the last of their steps."""
    top, bottom, left, right = SCENE + 38, SCENE + CHART - 30, 72, width - MARGIN
    scale_x, scale_y = (right - left) / end_s, (bottom - top) / AGE_MAX_MS
    for age_ms in (0, 50, 100, 150):
        y = bottom - age_ms * scale_y
        pen.line((left, y, right, y), FAINT if age_ms else GREY)
        name = f"{age_ms} ms" if age_ms == 150 else f"{age_ms}"
        pen.text((left - 7, y), name, INK, SMALL_FONT, anchor="rm")
    for second in range(0, round(end_s) + 1, 2):
        x, anchor = (left + second * scale_x, "ma") if second < end_s - 1 else (right, "ra")
        pen.text((x, bottom + 6), f"{second} s" if second else "0", INK, SMALL_FONT, anchor=anchor)
    limit = bottom - SPAN_NS / NS_PER_MS * scale_y
    pen.line((left, limit, right, limit), RED)
    middle = bottom - 125 * scale_y  # between two grid lines
    pen.text((right, middle), "too late to execute", RED, SMALL_FONT, anchor="rm")
    until = int(view.answered_s.searchsorted(now_s))
    for at_s, age_ms, usable in zip(
        view.answered_s[:until], view.ages_ms[:until], view.usable[:until], strict=True
    ):
        x, y = left + at_s * scale_x, bottom - min(age_ms, AGE_MAX_MS) * scale_y
        pen.rectangle((x - 1, y - 1, x + 1, y + 1), BLUE if usable else RED)
    newest = f"{view.ages_ms[until - 1]:.0f} ms" if until else "none yet"
    pen.text((MARGIN, SCENE), f"age of the newest actions: {newest}", INK, FONT)


def describe(view: View) -> str:
    end = "still standing" if view.fell_s is None else f"fell after {view.fell_s:.1f} s"
    p50, p99 = np.percentile(view.ages_ms, (50, 99))
    late = 1 - view.usable.mean()
    return f"{view.label}: {end}; actions p50 {p50:.0f}, p99 {p99:.0f} ms old, {late:.0%} too late"


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("files", metavar="FILE", nargs="*", type=Path, help="recordings (.mcap)")
    parser.add_argument("--label", action="append", default=[], help="of each recording, in order")
    parser.add_argument("--run", nargs="+", type=int, default=[], metavar="D_IN", help="make them")
    parser.add_argument(
        "--lockstep", nargs="+", type=int, default=[], metavar="D_IN", help="without a clock"
    )
    parser.add_argument("--seconds", type=float, default=6.0, help="of each run made")
    parser.add_argument("--gif", type=Path, default=Path("robot.gif"), help="what is written")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
