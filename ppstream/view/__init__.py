"""Serves a run's recorder to viewers over WebSocket, in a process beside rank 0. No torch.

Not here: who starts it and what it is told; see ``pipeline/child_process.py`` and ``recording/``.
Start reading at ``live_view.py``.
"""
