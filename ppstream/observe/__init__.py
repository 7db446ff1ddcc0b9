"""Output of a run while it goes on: log, metrics, health, profiles.

Not here: what is made of the log afterwards; see ``analysis``.
Start reading at ``log_writer.py``, then ``live_counters.py``.
"""
