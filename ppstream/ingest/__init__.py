"""Samples to windows: rings, their ledger, the cutter, and the sources of samples.

Not here: who may send samples; see ``sessions``.
Start reading at ``ring.py`` and ``window.py``.
"""
