"""The loops of rank 0 and of the policy rank, what executes, stages A, B and C, bring-up.

Not here: how a rank is put together and how it ends; see ``launch``.
Start reading at ``loop.py`` and ``policy_rank.py``.
"""
