"""Messages between processes, their bounds, keys, and the sockets that carry them.

Not here: who may speak and what follows from it; that is ``sessions``, ``control`` and ``robot``.
Start reading at ``robot_messages.py``.
"""
