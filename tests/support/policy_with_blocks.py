"""A policy that takes 3 ms in two named blocks; its actions are zeros."""

import time

from ppstream.core.specs import TensorSpec
from ppstream.observe.attribution import block


class TwoBlocks:
    inputs = ()
    outputs = (TensorSpec("actions", (4, 2)),)

    def reset(self, rows):
        pass

    def __call__(self, window, out):
        with block("encode"):
            time.sleep(0.002)
        with block("decode"):
            time.sleep(0.001)
            out["actions"].zero_()


def build(options, device):
    return TwoBlocks()
