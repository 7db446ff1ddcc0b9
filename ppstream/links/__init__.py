"""The data plane between ranks: slots, headers, and one transport a file.

Not here: permission to send (``pipeline/credits.py``) and liveness (``control``).
Start reading at ``protocol.py`` and ``slots.py``; on GPUs at ``device_link.py``.
"""
