"""The loops of rank 0 and of the policy rank, stages A, B and C, phases and bring-up.

Not here: how a rank is put together and how it ends; see ``launch``.
Start reading at ``stage0.py`` and ``stage1.py``.
"""
