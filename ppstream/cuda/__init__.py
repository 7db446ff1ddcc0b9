"""The CUDA driver: streams, events, waits, the device's clock. Nothing of the pipeline.

Not here: kernels of our own; they stand in ``ppstream_kernels``.
Start reading at ``driver.py``.
"""
