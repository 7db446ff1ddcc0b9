"""Whole data sets by the live run's resampler: episodes, windows, and ``ppstream resample``.

Not here: who reads a file; see ``recording/load.py``. Start reading at ``episode.py``, then
``cutting.py``. ``Windows`` is loaded on first use: what reads columns alone needs no torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ppstream.data.windows import Windows as Windows

__all__ = ["Windows"]


def __getattr__(name: str) -> Any:
    if name == "Windows":
        from ppstream.data import windows

        return windows.Windows
    raise AttributeError(f"module 'ppstream.data' has no attribute {name!r}")
