"""Choose the reader of a recording by its file's name.

Numpy's own files are read here: ``.npz`` with ``<stream>.stamps_ns`` (int64 ``[n]``) and
``<stream>.values`` (floats ``[n, dim]``) for each stream, and the ``.npy`` table of a Franka arm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ppstream.core.errors import ConfigError
from ppstream.recording.recording import Recording, Track, unreadable

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ppstream.config.schema import StreamConfig


#: What is a recording, for the command line.
FORMS: Final = ".mcap, .npz, Franka .npy, PX4 .ulg, ROS 1 .bag, or the folder of a ROS 2 bag"
NUMPY: Final = {".npz": b"PK", ".npy": b"\x93NUMPY"}  # how such a file begins
STAMPS_KEY: Final = ".stamps_ns"


VALUES_KEY: Final = ".values"


#: Columns of the Franka table: 0 is the stamp (float64 of nanoseconds, so 256 ns coarse).
FRANKA_COLUMNS: Final = {
    "q": slice(1, 8),  # rad
    "dq": slice(8, 15),  # rad/s
    "tau": slice(15, 22),  # Nm
    "tau_ext": slice(22, 29),  # Nm
    "ee_pose": slice(29, 36),  # m, quaternion
}


FRANKA_WIDTH: Final = 42


def load_recording(
    path: str | Path, streams: Sequence[StreamConfig] = (), robot: str | None = None
) -> Recording:
    """The recording in ``path``.

    Args:
        path: ``.npz``, ``.npy``, ``.mcap``, PX4's ``.ulg``, ROS 1's ``.bag``, a ROS 2 bag's folder.
        streams: where files made by others have them (``recorded``).
        robot: whose samples, of a run with several robots.

    Raises:
        ConfigError: the file cannot be read, is damaged or not of a known form, or needs a package
            that is missing; with every problem found.
    """
    path = Path(path)
    try:
        return _load(path, streams, robot)
    except ConfigError:
        raise
    except Exception as error:  # what readers raise on damaged files has no end
        raise unreadable(path, error) from error


def _load(path: Path, streams: Sequence[StreamConfig], robot: str | None) -> Recording:
    if path.is_dir() or path.suffix == ".bag":
        from ppstream.recording.ros_reader import load_bag

        return load_bag(path, streams)
    if path.suffix == ".mcap":
        from ppstream.recording.mcap_reader import load_mcap

        return load_mcap(path, streams, robot)
    if path.suffix == ".ulg":
        from ppstream.recording.ulog_reader import load_ulog

        return load_ulog(path, streams)
    if path.suffix not in NUMPY:
        raise ConfigError([f"{path}: is no recording by its name, want {FORMS}"])
    found = read_numpy(path)
    if isinstance(found, np.ndarray):
        return Recording(_franka_tracks(path, found))
    return Recording(_npz_tracks(path, found))


def read_numpy(path: Path) -> NDArray[Any] | dict[str, NDArray[Any]]:
    """Return what numpy has saved in ``path``: an array, or several by name.

    Raises:
        ConfigError: it is none of numpy's files; numpy itself would advise to unpickle it.
        Exception: it is damaged.
    """
    with path.open("rb") as file:
        head = file.read(max(map(len, NUMPY.values())))
        if not head.startswith(tuple(NUMPY.values())):
            raise ConfigError([f"{path}: begins as no .npz or .npy does"])
        file.seek(0)
        found = np.load(file, allow_pickle=False)
        return found if isinstance(found, np.ndarray) else dict(found)


def _franka_tracks(path: Path, table: NDArray[Any]) -> dict[str, Track]:
    if (
        table.ndim != 2
        or table.shape[1] != FRANKA_WIDTH
        or table.dtype != np.float64
        or not len(table)
    ):
        raise ConfigError(
            [
                f"{path}: got {table.dtype} {list(table.shape)}, want a Franka table, "
                f"float64 [n, {FRANKA_WIDTH}]; save other recordings as .npz"
            ]
        )
    stamps_ns = table[:, 0].astype(np.int64)
    return {name: Track(stamps_ns, table[:, columns]) for name, columns in FRANKA_COLUMNS.items()}


def _npz_tracks(path: Path, arrays: Mapping[str, NDArray[Any]]) -> dict[str, Track]:
    names = [key.removesuffix(STAMPS_KEY) for key in arrays if key.endswith(STAMPS_KEY)]
    problems = []
    tracks = {}
    for name in names:
        stamps_ns, values = arrays[name + STAMPS_KEY], arrays.get(name + VALUES_KEY)
        if values is None:
            problems.append(f"{path}: {name}{VALUES_KEY} is missing")
        elif stamps_ns.dtype != np.int64 or stamps_ns.ndim != 1 or not len(stamps_ns):
            problems.append(f"{path}: {name}{STAMPS_KEY} is not int64 [n] with a sample in it")
        elif values.ndim != 2 or len(values) != len(stamps_ns) or values.dtype.kind != "f":
            problems.append(f"{path}: {name}{VALUES_KEY} is not floats [{len(stamps_ns)}, dim]")
        else:
            tracks[name] = Track(stamps_ns, values)
    if not names:
        problems.append(
            f"{path}: no stream found; want keys <stream>{STAMPS_KEY} and <stream>{VALUES_KEY}"
        )
    if problems:
        raise ConfigError(problems)
    return tracks
