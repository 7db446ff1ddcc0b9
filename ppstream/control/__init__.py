"""The control plane between the ranks of a run, and what notices that one of them is gone.

Not here: tensors; they travel by ``links``.
Start reading at ``peer.py``, then ``heartbeat.py`` and ``watchdog.py``.
"""
