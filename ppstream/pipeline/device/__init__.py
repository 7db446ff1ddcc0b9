"""The same loops where the devices decide the order: the host queues ahead, and looks later.

Not here: streams and events themselves; see ``cuda``.
Start reading at ``stage0.py`` and ``stage1.py``.
"""
