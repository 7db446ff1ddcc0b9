"""Profiler traces: where the time of a device goes. The standard library only.

Not here: how a trace is taken; see ``observe/profiler.py``.
Start reading at ``cli.py`` and ``findings.py``.
"""
