"""More than one pipeline: how many a fleet of robots needs, and a directory that hands them out.

``plan.py`` answers the first from measured times, without a cluster. Ray starts the pipelines and
restarts them (``cluster.py``, the only file that imports it); robots ask the directory for an
endpoint and then speak the native wire to it: no sample passes through here. Read ``directory.py``
first.
"""
