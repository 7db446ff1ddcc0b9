"""Robots on rank 0: who may speak, for which row, how much, and what each is told.

Not here: the robot's side; see ``robot``.
Start reading at ``server.py``.
"""
