"""The same loops where the devices decide the order: the host queues ahead, and looks later.

Not here: streams and events themselves; see ``cuda``.
Start reading at ``executor.py`` and ``policy_rank.py``.
"""
