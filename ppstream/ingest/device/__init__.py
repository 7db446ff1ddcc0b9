"""Samples to windows on a GPU: rings in its memory, and the window's kernels in one launch.

Not here: what a window is; see ``ingest/window.py``.
Start reading at ``window.py``.
"""
