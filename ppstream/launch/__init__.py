"""One rank of a run, put together: placement, handshake, monitoring, and how it ends.

Not here: what happens to an envelope; see ``pipeline``.
Start reading at ``run_rank0.py`` and ``run_policy_rank.py``.
"""
