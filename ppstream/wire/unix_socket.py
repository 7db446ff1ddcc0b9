"""UnixServer and UnixClient: messages between processes of one host, by the thread that asks.

One packet of a UNIX socket (SOCK_SEQPACKET) is one message. A message that the socket does not take
lies in memory that its sender shares (``message_memory.py``); a packet, the *carrier*, says where.
What waits for a receiver is bounded by the kernel, which charges it to the sender (SO_SNDBUF).
A server closes what strangers chose on another thread (``closing.py``).
"""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import select
import socket
import stat
import struct
import threading
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any, Final

from ppstream.core.errors import ConfigError, ProtocolError
from ppstream.wire.closing import Closer
from ppstream.wire.endpoints import OWN_MODE, SHARED_MODE, folder_problem, unix_path
from ppstream.wire.message_memory import (
    CARRIER_BYTES,
    MAGIC,
    LargeMessage,
    OwnMemory,
    PeerMemory,
)
from ppstream.wire.message_socket import (
    MAX_DRAIN,
    MAX_DRAIN_BYTES,
    MAX_FRAME_BYTES,
    NO_TAIL,
    Frame,
    Message,
    Packet,
    PacketSource,
)

PACKET_BYTES_MAX: Final = 32 * 1024  # in one packet; SO_SNDBUF has room for six, or 50 carriers
#: Of a message with a tail, as a camera's: while rank 0 is busy nobody reads, and what finds no
#: room is lost. A carrier costs some 7 us more than a packet.
TAILED_BYTES_MAX: Final = 8 * 1024
BACKLOG: Final = 128  # connections not accepted yet
LOOKS_MAX: Final = 2  # for readable connections, in one drain
READY_MAX: Final = 64  # connections that the kernel names at once
#: A packet is cut, or the descriptors that it brings; no enum, whose ``&`` is Python code.
CUT: Final = int(socket.MSG_TRUNC | socket.MSG_CTRUNC)
CUT_BYTES, CUT_FDS = int(socket.MSG_TRUNC), int(socket.MSG_CTRUNC)
TOO_LARGE: Final = (errno.EMSGSIZE, errno.ENOBUFS)  # for this socket's buffer, or in one piece
#: Room for as many descriptors as a packet may bring: the kernel would close others here and now.
ALL_FDS: Final = socket.CMSG_LEN(253 * struct.calcsize("i"))  # SCM_MAX_FD
CREDENTIALS: Final = struct.Struct("iII")  # pid, uid, gid: struct ucred of SO_PEERCRED


class _Connection:
    """One connection: the name of its other end, and the memory that each of them shares."""

    __slots__ = ("own", "peer", "socket", "theirs")

    def __init__(self, peer: bytes, made: socket.socket) -> None:
        self.peer = peer
        self.socket = made
        self.own: OwnMemory | None = None
        self.theirs: PeerMemory | None = None

    def end(self) -> None:
        """No message is sent or received any more; the socket is somebody else's to close."""
        self.theirs = None
        if self.own is not None:
            self.own.close()


class _UnixSocket(ABC):
    """The part that both sides share: sending from any thread, and taking one packet."""

    def __init__(self, endpoint: str, frame_bytes_max: int) -> None:
        self.endpoint = endpoint
        self.wake: Callable[[], None] = lambda: None
        self.malformed = 0
        self.has_more = False
        self._frame_bytes_max = frame_bytes_max
        self._close_fd: Callable[[int], None] = os.close
        self._buffer = bytearray(PACKET_BYTES_MAX)
        self._buffers = (self._buffer,)
        self._view = memoryview(self._buffer)
        self._lock = threading.Lock()  # held to send, and to make or close a connection
        self._closed = False
        self._epoll = select.epoll()  # one descriptor to poll, whatever connections there are
        self.fd = self._epoll.fileno()

    def send(self, body: bytes, peer: bytes = b"", tail: memoryview = NO_TAIL) -> bool:
        """As ``MessageSocket``."""
        with self._lock:
            connection = None if self._closed else self._connection(peer)
            if connection is None:
                return False
            try:
                if tail is NO_TAIL and len(body) <= PACKET_BYTES_MAX:
                    connection.socket.send(body)
                    return True
                if tail is not NO_TAIL and len(body) + tail.nbytes <= TAILED_BYTES_MAX:
                    connection.socket.sendmsg((body, tail))
                    return True
            except OSError as failed:
                if failed.errno not in TOO_LARGE:
                    return False
            try:
                if connection.own is None:
                    connection.own = OwnMemory()
                return connection.own.send(connection.socket, (body, tail))
            except OSError:  # what waits fills the buffer, or no memory or descriptor is left
                return False

    @abstractmethod
    def _connection(self, peer: bytes) -> _Connection | None:
        """Returns what leads to ``peer``; None: nobody is there. The lock is held."""

    def _receive(self, connection: _Connection) -> Message | None:
        """The next message; None: there is none now, or it was malformed.

        Raises:
            EOFError: the other side left, sent more than it may, or a memory that did not arrive.
        """
        try:
            size, control, flags, _ = connection.socket.recvmsg_into(
                self._buffers, ALL_FDS, socket.MSG_CMSG_CLOEXEC
            )
        except (BlockingIOError, ConnectionResetError):
            return None  # reset: it left without having read all; what it sent comes next
        except OSError as error:
            raise EOFError from error
        if size and size != CARRIER_BYTES and not control and not flags & CUT:
            return bytes(self._view[:size])
        fds = [
            fd
            for level, kind, data in control
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS)
            for (fd,) in struct.iter_unpack("i", data)
        ]
        return self._message(connection, bytes(self._view[:size]), fds, flags)

    def _message(
        self, connection: _Connection, packet: bytes, fds: list[int], flags: int
    ) -> Message | None:
        """The message of a packet, as ``_receive``; other descriptors than its own are closed."""
        is_carrier = len(packet) == CARRIER_BYTES and packet.startswith(MAGIC)
        try:
            if flags & CUT_BYTES or not packet:
                raise EOFError
            if flags & CUT_FDS or (is_carrier and not fds and connection.theirs is None):
                self.malformed += 1
                raise EOFError  # no descriptor was free; a memory comes once for each connection
            if is_carrier:
                return self._carried(connection, packet, fds)
            if fds:
                raise ProtocolError("a message with descriptors")
            return packet
        except ProtocolError:
            self.malformed += 1
            return None
        finally:
            for fd in fds:
                self._close_fd(fd)

    def _carried(
        self, connection: _Connection, carrier: bytes, fds: list[int]
    ) -> bytes | LargeMessage:
        """The message that a carrier tells of; a descriptor of new memory is taken from ``fds``.

        Raises:
            ProtocolError: it is not there.
            EOFError: more than the other side may send.
        """
        theirs = connection.theirs
        if len(fds) == 1:
            theirs = PeerMemory(fds[0], self._close_fd)
            fds.clear()
        if fds or theirs is None:
            raise ProtocolError("a message without its memory, or with several")
        message = theirs.message(carrier, self._frame_bytes_max)
        connection.theirs = theirs
        return message


class UnixServer(_UnixSocket):
    """Listens at ``unix://PATH`` for processes of this user, or of ``allowed_uids`` alone.

    The folder of PATH is made when it is missing, for its owner alone (mode 700; 711 with
    ``allowed_uids``). A socket file that nobody listens on any more is replaced.

    Raises:
        ConfigError: somebody listens there, or it is another file; or the folder is not this user's
            own, or open to others.
    """

    def __init__(
        self, endpoint: str, frame_bytes_max: int, allowed_uids: Collection[int] = ()
    ) -> None:
        self._path = Path(unix_path(endpoint) or "")
        self._listener = _listen(self._path, is_shared=bool(allowed_uids))
        self._listener_fd = self._listener.fileno()
        self._file = _identity(self._path)
        super().__init__(f"unix://{self._path}", frame_bytes_max)
        self._closer = Closer()
        self._close_fd = self._closer.close
        self._uids = {*allowed_uids} or {os.geteuid()}
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._connections_max = limit // 4  # each may bring a memory: half are left to others
        self._refused: Counter[str] = Counter()
        self._names = count(1)  # no connection gets the name of another
        self._by_peer: dict[bytes, _Connection] = {}
        self._by_fd: dict[int, _Connection] = {}
        self._turn: deque[int] = deque()  # readable descriptors that were not read yet
        self._epoll.register(self._listener_fd, select.EPOLLIN)

    def drain(self, limit: int = MAX_DRAIN) -> list[Frame]:
        """As ``MessageSocket``; of each connection in turn one message, so none waits for another.

        Connections count towards ``limit`` as messages do.
        """
        frames: list[Frame] = []
        left = MAX_DRAIN_BYTES
        self.has_more = False
        if self._closed:
            return frames
        looks = 0
        for _ in range(limit):
            if not self._turn:
                if looks == LOOKS_MAX or not (ready := self._epoll.poll(0, READY_MAX)):
                    return frames
                looks += 1
                for fd, _ in ready:
                    self._turn.append(fd)
            fd = self._turn.popleft()
            if fd == self._listener_fd:
                self._accept()
                continue
            connection = self._by_fd[fd]
            try:
                message = self._receive(connection)
            except EOFError:
                self._part(fd)
                continue
            if message is not None:
                frames.append(Frame(connection.peer, message))
                if looks != 1:  # most have one message: another look is less than a read in vain
                    self._turn.append(fd)  # until it has none left
                left -= len(message)
                if left <= 0:
                    break
        self.has_more = True
        return frames

    def packets_of(self, peer: bytes) -> PacketSource | None:
        """As ``MessageSocket``."""
        connection = self._by_peer.get(peer)
        return None if self._closed or connection is None else _Packets(self, connection)

    def messages(self, connection: _Connection, packets: Sequence[Packet]) -> list[Frame]:
        """As ``PacketSource``, of ``connection``."""
        frames: list[Frame] = []
        is_over = False
        for data, fds, flags in packets:
            try:
                message = self._message(connection, b"" if is_over else data, [*fds], flags)
            except EOFError:
                is_over = True
                continue
            if message is not None:
                frames.append(Frame(connection.peer, message))
        if is_over and connection.peer in self._by_peer:
            with suppress(ValueError):
                self._turn.remove(connection.socket.fileno())
            self._part(connection.socket.fileno())
        return frames

    def refused(self) -> dict[str, int]:
        """As ``MessageSocket``: ``uid`` (not allowed), ``accept`` (no descriptor), ``closed``."""
        if not self._closed:
            self._epoll.modify(self._listener_fd, select.EPOLLIN)  # it may have been given up
        return dict(self._refused)

    def close(self) -> None:
        """As ``MessageSocket``; removes the socket's file."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._epoll.close()
            for connection in self._by_fd.values():
                connection.end()
                connection.socket.close()
            self._closer.end()
            self._listener.close()
        with suppress(OSError):
            if _identity(self._path) == self._file:  # not of a server that came after
                self._path.unlink()

    def _connection(self, peer: bytes) -> _Connection | None:
        return self._by_peer.get(peer)

    def _accept(self) -> None:
        try:
            made, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError:  # no descriptor is left: look again in about a second
            self._refused["accept"] += 1
            self._epoll.modify(self._listener_fd, 0)
            return
        found = made.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
        if CREDENTIALS.unpack(found)[1] not in self._uids:
            self._refused["uid"] += 1
            self._close_fd(made.detach())
        elif len(self._by_fd) >= self._connections_max:
            self._refused["accept"] += 1
            self._close_fd(made.detach())
        else:
            made.settimeout(0)
            peer = next(self._names).to_bytes(8, "little")
            with self._lock:
                self._by_peer[peer] = self._by_fd[made.fileno()] = _Connection(peer, made)
            self._epoll.register(made.fileno(), select.EPOLLIN)

    def _part(self, fd: int) -> None:
        """Close a connection whose peer has left."""
        connection = self._by_fd[fd]
        self._refused["closed"] += 1
        with self._lock:
            del self._by_fd[fd], self._by_peer[connection.peer]
            self._epoll.unregister(fd)
            connection.end()
            self._close_fd(connection.socket.detach())  # what it has not read goes with it


class _Packets:
    """One connection of a server, as ``PacketSource``."""

    def __init__(self, server: UnixServer, connection: _Connection) -> None:
        self._server, self._connection = server, connection
        self.fileno = connection.socket.fileno

    def messages(self, packets: Sequence[Packet]) -> list[Frame]:
        """As ``PacketSource``."""
        return self._server.messages(self._connection, packets)


class UnixClient(_UnixSocket):
    """Connects to ``unix://PATH`` whenever it sends and has no connection."""

    def __init__(self, endpoint: str) -> None:
        self._path = unix_path(endpoint) or ""
        super().__init__(f"unix://{self._path}", MAX_FRAME_BYTES)
        self._server: _Connection | None = None

    def drain(self, limit: int = MAX_DRAIN) -> list[Frame]:
        """As ``MessageSocket``."""
        frames: list[Frame] = []
        left = MAX_DRAIN_BYTES
        self.has_more = False
        while self._server is not None and len(frames) < limit and left > 0:
            malformed = self.malformed
            try:
                message = self._receive(self._server)
            except EOFError:
                with self._lock:
                    self._leave()
                return frames
            if message is not None:
                frames.append(Frame(b"", message))
                left -= len(message)
            elif self.malformed == malformed:
                return frames
        self.has_more = self._server is not None
        return frames

    def packets_of(self, peer: bytes) -> None:
        """As ``MessageSocket``: its link reads."""

    def refused(self) -> dict[str, int]:
        """As ``MessageSocket``: nothing, since nobody connects to a client."""
        return {}

    def close(self) -> None:
        """As ``MessageSocket``."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._leave()
                self._epoll.close()

    def _connection(self, peer: bytes) -> _Connection | None:
        """The connection; a new one when there is none. The lock is held."""
        if self._server is None:
            made = seqpacket()
            try:
                made.connect(self._path)
            except OSError:  # nobody listens, or too many wait to be accepted
                made.close()
                return None
            self._epoll.register(made.fileno(), select.EPOLLIN)
            self._server = _Connection(b"", made)
        return self._server

    def _leave(self) -> None:
        """Close the connection, if there is one; the lock is held."""
        if self._server is not None:
            with suppress(FileNotFoundError):  # a process that was forked has done so, too
                self._epoll.unregister(self._server.socket.fileno())
            self._server.end()
            self._server.socket.close()
            self._server = None


def seqpacket() -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.settimeout(0)
    return made


# ---- the file of a server ---------------------------------------------------------------------


def _listen(path: Path, *, is_shared: bool) -> socket.socket:
    """A listening socket at ``path``.

    Raises:
        ConfigError: as ``UnixServer``.
    """
    listener = seqpacket()
    try:
        if problem := folder_problem(path, is_shared=is_shared):
            raise ConfigError([f"cannot listen on 'unix://{path}': {problem}"])
        path.parent.mkdir(SHARED_MODE if is_shared else OWN_MODE, exist_ok=True)
        with _locked(path.parent):
            _remove_stale(path)
            listener.bind(str(path))
            if is_shared:
                path.chmod(0o666)  # SO_PEERCRED decides
            listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError([f"cannot listen on 'unix://{path}': {error.strerror}"]) from error
    except ConfigError:
        listener.close()
        raise
    return listener


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """No other server begins to listen in ``folder`` meanwhile."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _remove_stale(path: Path) -> None:
    """Remove the file of a server that has ended."""
    if problem := taken_problem(path):
        raise ConfigError([f"cannot listen on 'unix://{path}': {problem}"])
    path.unlink(missing_ok=True)


def taken_problem(path: Path) -> str | None:
    """Returns why no server can begin to listen at ``path`` now; None: there is none of that."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            return "it is a file and no socket"
    except FileNotFoundError:
        return None
    with seqpacket() as probe:
        is_ended = probe.connect_ex(str(path)) in (errno.ECONNREFUSED, errno.ENOENT)
    server = "in use by a running server; end it, or give each run an endpoint of its own"
    return None if is_ended else server


def _identity(path: Path) -> tuple[Any, ...]:
    found = path.lstat()
    return found.st_dev, found.st_ino, found.st_ctime_ns
