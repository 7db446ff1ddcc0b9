"""Bag: a ROS bag whose messages are read again one by one, in any order, by topic and time."""

from __future__ import annotations

import os
import weakref
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Final, NamedTuple

OPEN_MAX: Final = 32  # bags of a process: each has a file open, or several
NOTHING: Final = None, None, b""


class BagPlace(NamedTuple):
    """Location of a message among those of its topic."""

    number: int  # from 0, in the order of the bag
    at_ns: int  # when it was logged
    twin: int  # so many of the topic before it were logged at the same time


class BagPlaces:
    """Numbers the messages of a topic, as they are read first."""

    def __init__(self) -> None:
        self._logged: Counter[int] = Counter()
        self._number = 0

    def next(self, at_ns: int) -> BagPlace:
        place = BagPlace(self._number, at_ns, self._logged[at_ns])
        self._logged[at_ns] += 1
        self._number += 1
        return place


class Bag:
    """A bag that is opened when something is asked for, and closed with its last user.

    Pickles as its path. A forked process opens it anew: two must not move one place in a file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._open: _OpenBag | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_open": None}

    @property
    def reader(self) -> Any:
        """rosbags' own, opened."""
        return self._opened().reader

    def data(self, topic: str, place: BagPlace) -> bytes:
        """One message again. Raises LookupError: it is not there any more."""
        return self._opened().data(topic, place)

    def decoded(self, kind: str, data: bytes) -> object:
        """A message of a type, as the bag defines it. Raises what rosbags raises on damage."""
        found: object = self._opened().reader.deserialize(data, kind)
        return found

    def close(self) -> None:
        """It may be opened again."""
        if self._open is not None:
            self._open.close()
            self._open = None

    def _opened(self) -> _OpenBag:
        if self._open is None or not self._open.is_usable:
            self._open = _OpenBag(self._path)
        return self._open


class _OpenBag:
    """The files of a bag."""

    def __init__(self, path: Path) -> None:
        from rosbags.highlevel import AnyReader
        from rosbags.typesys import Stores, get_typestore

        self.reader = AnyReader([path], default_typestore=get_typestore(Stores.LATEST))
        self.reader.open()
        self._share_types()
        self._process = os.getpid()
        self._ended = weakref.finalize(self, self.reader.close)
        #: By topic the number of the message that comes next, if they are read in order.
        self._next: dict[str, tuple[int, Iterator[Any] | None]] = {}
        others = [one for one in list(_opened.values()) if one.is_usable]
        for oldest in others[: max(0, len(others) + 1 - OPEN_MAX)]:
            oldest.close()
        _opened[id(self)] = self

    def _share_types(self) -> None:
        """Bags that define the same types share what decodes them, which takes long to generate."""
        defined = frozenset((one.msgtype, one.msgdef) for one in self.reader.connections)
        if len(_types) >= OPEN_MAX:
            _types.clear()
        self.reader.typestore = _types.setdefault(defined, self.reader.typestore)

    @property
    def is_usable(self) -> bool:
        return self._ended.alive and self._process == os.getpid()

    def close(self) -> None:
        self._ended()

    def data(self, topic: str, place: BagPlace) -> bytes:
        number, messages = self._next.pop(topic, (-1, None))
        if number == place.number:
            messages = messages or self._from(topic, place)
            _, at_ns, data = next(messages, NOTHING)
            if at_ns == place.at_ns:  # files of a bag that was split may overlap in time
                self._next[topic] = number + 1, messages
                return data
        _, at_ns, data = next(self._from(topic, place, place.at_ns + 1), NOTHING)
        if at_ns is None:
            raise LookupError(f"no message of {place.at_ns} ns is in it any more")
        self._next[topic] = place.number + 1, None
        return data

    def _from(self, topic: str, place: BagPlace, stop_ns: int | None = None) -> Iterator[Any]:
        connections = [c for c in self.reader.connections if c.topic == topic]
        found = self.reader.messages(connections, place.at_ns, stop_ns)
        return islice(found, place.twin, None)


#: In the order in which they were opened.
_opened: Final[weakref.WeakValueDictionary[int, _OpenBag]] = weakref.WeakValueDictionary()

#: Generated code of rosbags, by the types that a bag defines.
_types: Final[dict[frozenset[tuple[str, Any]], Any]] = {}
