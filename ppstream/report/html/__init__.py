"""The page of ``--html``: one file without scripts from elsewhere.

Not here: what its numbers mean; see ``analysis``.
Start reading at ``page.py``.
"""
