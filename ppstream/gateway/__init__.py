"""Servers of foreign wires: robots of other projects, served as robots of a run. No torch.

A process of its own, one ``RobotClient`` a connection; rank 0 sees ordinary robots. Not here: what
bytes mean, which ``wire/`` reads and writes, and anything that decides about motion.
Start reading at ``wires.py``, then ``openpi.py`` and ``session.py``.
"""
