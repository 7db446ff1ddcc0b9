"""Whole data sets by the live run's resampler: episodes, windows, and ``ppstream resample``.

Not here: who reads a file; see ``recording/load.py``. Start reading at ``episode.py``, then
``cutting.py``.
"""
