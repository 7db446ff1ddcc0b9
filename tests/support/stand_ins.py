"""Stand-ins for libraries that a program imports and does not use: they need not be installed."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Collection
from typing import Any


class StandInKind(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn

    def __or__(cls, _: Any) -> Any:
        return cls

    __ror__ = __or__


class StandIn(metaclass=StandInKind):
    """Whatever a module of such a library names: a class, a decorator or a value."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __call__(self, *_: Any, **__: Any) -> Any:
        return self


class StandInModule(types.ModuleType):
    __version__ = "0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (StandIn,), {})


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, absent: Collection[str]) -> None:
        self.absent = absent

    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in self.absent:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return StandInModule(spec.name)

    def exec_module(self, _: types.ModuleType) -> None: ...


def stand_in_for(absent: Collection[str]) -> None:
    """From now on every import of these names something that does nothing."""
    sys.meta_path.insert(0, StandIns(absent))


#: Compiled operators of torchvision want its CUDA; none is used, but their names must be there.
COMPILED = (
    *("nms", "qnms", "roi_align", "qroi_align", "_roi_align_backward", "roi_pool"),
    *("_roi_pool_backward", "ps_roi_align", "_ps_roi_align_backward", "ps_roi_pool"),
    *("_ps_roi_pool_backward", "deform_conv2d", "_deform_conv2d_backward"),
)


def stand_in_for_operators() -> Any:
    """Names torchvision's operators; returns what must be kept as long as it is imported."""
    from torch.library import Library

    operators = Library("torchvision", "DEF")
    for operator in COMPILED:
        operators.define(f"{operator}() -> Tensor")
    return operators
