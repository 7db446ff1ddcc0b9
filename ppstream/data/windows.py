"""Windows: an iterable data set of a run's windows, resampled on the device that trains.

Workers of a ``DataLoader`` copy raw samples; one op makes the batch of them on the device. Which
windows a batch has follows from seed, epoch and batch number alone, so it is the same for any
number of workers, and a state is a few numbers.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from ppstream.config.load import read
from ppstream.core.errors import ConfigError
from ppstream.data.column_cache import load_columns
from ppstream.data.cutting import BatchCutter, RawBatch, to_device
from ppstream.data.episode import Cut, RecordedEpisode
from ppstream.data.inputs import find_inputs
from ppstream.data.shuffle import ShuffledOrder

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from ppstream.config.schema import PipelineConfig

STATE_KEYS: Final = (
    "epoch",
    "batch",
    "seed",
    "windows",
    "batch_size",
    "rank",
    "world_size",
    "order",  # checksum of what windows there are, and how they are ordered
)


class Windows(IterableDataset[RawBatch]):
    """Windows of recordings, in batches; iterate ``batches`` or hand it to a ``DataLoader``.

    Iterated itself it yields ``RawBatch``, on the CPU: give a ``DataLoader`` ``batch_size=None``,
    and each batch to ``cut``. ``batches`` does both.

    Args:
        paths: recordings, LeRobot folders, or folders of recordings.
        config: of the live run; a file's name as ``--config``, or read already.
        batch_size: windows of a batch.
        shuffle: a new order of all windows in each epoch; else that of the recordings.
        seed: of the order.
        drop_last: leave out what is no whole batch, so that all ranks have as many batches.
        cut: ``replay`` has a scheduled replay's windows, bit for bit; see ``episode.py``.
        cache: folder for decoded samples, which are mapped: for data larger than the memory. Frames
            are decoded there, too, 0.9 MB each of 480 x 640; without it they are read from the
            recordings whenever a batch has them.
        frames: cameras' frames are in batches, where the recordings have them; else their numbers.
        rank: of ``world_size`` processes that share an epoch: no window is two ranks', and
            together they have all. Default: torchrun's ``RANK`` and ``WORLD_SIZE``.
        world_size: see ``rank``.

    Raises:
        ConfigError: an input cannot be read, or ``rank`` is none of ``world_size``.
    """

    def __init__(
        self,
        paths: Sequence[str | Path] | str | Path,
        config: PipelineConfig | str,
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        cut: Cut = "replay",
        cache: str | Path | None = None,
        frames: bool = True,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        self.config = read(config) if isinstance(config, str) else config
        self.rank = int(os.environ.get("RANK", "0")) if rank is None else rank
        self.world_size = world_size or int(os.environ.get("WORLD_SIZE", "1"))
        if not 0 <= self.rank < self.world_size or batch_size < 1:
            raise ConfigError(
                [f"rank is {self.rank} of {self.world_size}, batch_size {batch_size}; want a rank "
                 "of 0 to world_size - 1 and at least one window"]
            )  # fmt: skip
        inputs = find_inputs([paths] if isinstance(paths, str | Path) else paths)
        folder = None if cache is None else Path(cache)
        found = load_columns(inputs, self.config, cut, folder, frames=frames)
        self._episodes: list[RecordedEpisode] = [one for episodes in found for one in episodes]
        counts = np.array([one.windows for one in self._episodes])
        self._behind: NDArray[np.int64] = counts.cumsum()  # number behind each episode's last
        self.windows = int(counts.sum())  # of all ranks
        self._cutter = BatchCutter(self.config, shown=_shown(self._episodes))
        self._batch_size, self._shuffle, self._seed = batch_size, shuffle, seed
        self._drop_last = drop_last
        self._order = self._checksum()
        self._epoch = self._batch = 0  # of the next batch
        self._passes = 0  # of this copy, in a worker
        #: for workers that persist: epoch, batch; the newest pass, by two numbers; its first batch
        self._shared = torch.zeros(6, dtype=torch.int64)
        self._shared.share_memory_()  # type: ignore[no-untyped-call]

    def __len__(self) -> int:
        """Batches of an epoch of this rank."""
        own = (self.windows - self.rank + self.world_size - 1) // self.world_size
        if self._drop_last:
            return self.windows // (self.world_size * self._batch_size)
        return -(-own // self._batch_size)

    def __iter__(self) -> Iterator[RawBatch]:
        """The rest of the epoch, from the state on; of a worker every n-th batch."""
        if (worker := get_worker_info()) is None:
            first, step, epoch, batch = 0, 1, self._epoch, self._batch
        else:  # now, not with the first batch: the state moves as soon as another's is cut
            first, step = worker.id, worker.num_workers
            epoch, batch = self._begin_pass(worker.seed - worker.id)
        return (self.raw(epoch, number) for number in range(batch + first, len(self), step))

    def _begin_pass(self, loader: int) -> tuple[int, int]:
        """Returns where a pass of this worker begins; its copy of the state is its first one's.

        All workers of a loader begin a later pass where the first of them finds the state, which
        does not move before a batch of that one is cut.
        """
        self._passes += 1
        if self._passes == 1:
            return self._epoch, self._batch
        found, name = self._shared[:2].clone(), torch.tensor([loader, self._passes])
        if not torch.equal(self._shared[2:4], name):  # looked at behind the state
            self._shared[4:6] = found
            self._shared[2:4] = name
        epoch, batch = self._shared[4:6].tolist()
        return epoch, batch

    def indices(self, epoch: int, batch: int) -> NDArray[np.int64]:
        """Numbers of a batch's windows among those of all recordings."""
        own = np.arange(batch * self._batch_size, (batch + 1) * self._batch_size)
        places = own * self.world_size + self.rank
        places = places[places < self.windows]
        if not self._shuffle:
            return places
        return ShuffledOrder(self.windows, self._seed, epoch)(places)

    def raw(self, epoch: int, batch: int) -> RawBatch:
        """Samples of one batch."""
        wanted = self.indices(epoch, batch)
        episodes = self._behind.searchsorted(wanted, "right")
        begins = self._behind[episodes] - [self._episodes[e].windows for e in episodes]
        numbers = wanted - begins
        order = np.argsort(episodes, kind="stable")
        parts = np.split(order, np.flatnonzero(np.diff(episodes[order])) + 1)
        picked = [(self._episodes[episodes[part[0]]], numbers[part]) for part in parts]
        position = torch.tensor([epoch, batch, len(wanted)])
        return self._cutter.raw(picked)._replace(position=position)

    def cut(self, raw: RawBatch, device: torch.device | str = "cpu") -> dict[str, Tensor]:
        """The batch's windows on the device; from now on the state is behind this batch.

        Returns:
            Tensors by name, ``BatchCutter`` says which; freshly allocated.
        """
        epoch, batch, _ = raw.position.tolist()
        windows = self._cutter.cut(to_device(raw, torch.device(device)))
        self._go_to(*((epoch, batch + 1) if batch + 1 < len(self) else (epoch + 1, 0)))
        return windows

    def batches(
        self, device: torch.device | str = "cpu", workers: int = 0, **loader: Any
    ) -> Iterator[dict[str, Tensor]]:
        """The rest of the epoch, from the state on, cut on the device.

        Args:
            device: where batches are made.
            workers: processes that copy samples; 0 copies in this one.
            loader: more for ``DataLoader``, as ``prefetch_factor``.
        """
        pinned = torch.device(device).type == "cuda"
        options = {"num_workers": workers, "pin_memory": pinned} | loader
        for raw in DataLoader(self, batch_size=None, **options):
            yield self.cut(raw, device)

    def state_dict(self) -> dict[str, int]:
        """State behind the newest batch that was cut; what workers read ahead does not count."""
        numbers = (self._epoch, self._batch, self._seed, self.windows, self._batch_size)
        places = (self.rank, self.world_size, self._order)
        return dict(zip(STATE_KEYS, (*numbers, *places), strict=True))

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on where ``state_dict`` was.

        Raises:
            ConfigError: the state is of other recordings, or of these in another order, of another
                seed, batch or rank.
        """
        own = self.state_dict()
        state = {"order": self._order} | state  # older states have none
        problems = [
            f"{key} of the state is {state.get(key)}, here it is {own[key]}"
            for key in STATE_KEYS[2:]
            if state.get(key) != own[key]
        ]
        if problems:
            raise ConfigError(problems)
        self._go_to(state["epoch"], state["batch"])

    def _go_to(self, epoch: int, batch: int) -> None:
        self._epoch, self._batch = epoch, batch
        self._shared[:2] = torch.tensor([epoch, batch])

    def _checksum(self) -> int:
        """Differs where the same seed and batch would be other windows."""
        found = zlib.crc32(repr((self._shuffle, self._drop_last)).encode())
        for episode in self._episodes:
            found = zlib.crc32(episode.ends_ns.tobytes(), found)
        return found


def _shown(episodes: Sequence[RecordedEpisode]) -> list[str]:
    """Cameras whose frames can be read; of all recordings, or of none."""
    shown = {camera for one in episodes for camera in one.frames}
    parted = [camera for camera in shown if any(camera not in one.frames for one in episodes)]
    if parted:
        raise ConfigError(
            [f"frames of {', '.join(sorted(parted))} can be read of some recordings, and of others "
             "are in videos; want either, or frames=False"]
        )  # fmt: skip
    return sorted(shown)
