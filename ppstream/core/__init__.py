"""The words that every room uses: clock, errors, tensor specs, durations, the waiter.

Not here: anything that opens a socket, imports torch or knows what a robot is.
Start reading at ``errors.py`` and ``specs.py``.
"""
