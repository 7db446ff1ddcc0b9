"""User code: what a policy has to be, whether it fits, and how it is wrapped.

Not here: when it runs; see ``pipeline/policy_rank.py``.
Start reading at ``protocol.py``.
"""
