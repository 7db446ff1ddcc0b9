"""Records a run as MCAP, and reads recordings of several formats. No torch.

Not here: who plays a recording; see ``ingest/sources.py`` and ``launch/replay.py``.
Start reading at ``recording.py`` and ``recorder.py``.
"""
