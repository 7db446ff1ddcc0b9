"""Messages between processes, their bounds, keys, and the ZeroMQ socket.

Not here: who may speak and what follows from it; that is ``sessions``, ``control`` and ``robot``.
Start reading at ``robot_messages.py``.
"""
