"""The measure: logs in, verdict out. Pure, and the standard library only.

Not here: how a verdict is shown (``report``) and how a log is written (``observe/log_writer.py``).
Start reading at ``judge.py``, then ``scores.py`` and ``audits.py``.
"""
