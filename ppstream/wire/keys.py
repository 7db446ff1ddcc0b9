"""Keys of robots and servers: CURVE, 32 bytes as 40 characters of Z85; and the tool for them.

A pair lies in ``NAME.secret`` (readable by its owner alone), its public half in ``NAME.public``:
certificates as pyzmq and czmq write them; files with nothing but the key are read, too. A server's
allow-list is a text file with ``name key`` on each line. What is done with keys on a socket is
``zmq_socket.py``'s.
"""

from __future__ import annotations

import argparse
import os
import stat
import struct
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from ppstream.core.errors import ConfigError

KEY_CHARACTERS: Final = 40
ROBOTS_MAX: Final = 4096  # of one allow-list
FILE_BYTES_MAX: Final = 1 << 20  # of anything read here
NAME_CHARACTERS: Final = 64  # as a robot's name on the wire
OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO
SECRET_MODE: Final = 0o600
PUBLIC_MODE: Final = 0o644


class ServerKeys(NamedTuple):
    """Keys of a server: its secret key, and the public keys it serves, with their names."""

    secret: bytes
    allowed: dict[bytes, str]

    def __repr__(self) -> str:
        return f"ServerKeys({len(self.allowed)} robots)"  # no secret in logs and tracebacks


class ClientKeys(NamedTuple):
    """Keys of a robot: its own secret key, and the public key of the server it trusts."""

    secret: bytes
    server: bytes

    def __repr__(self) -> str:
        return f"ClientKeys(server={self.server.decode()!r})"


def client_keys(secret_file: str | Path, server_file: str | Path) -> ClientKeys:
    """A robot's keys, from its ``.secret`` and its server's ``.public`` file.

    Raises:
        ConfigError: a file is missing, holds no key, or the secret can be read by others.
    """
    return ClientKeys(_secret(Path(secret_file)), _public(Path(server_file)))


def server_keys(
    secret_file: str | Path | None, allowed_file: str | Path | None
) -> ServerKeys | None:
    """A server's keys, from its ``.secret`` file and its allow-list; None when none are named.

    Raises:
        ConfigError: as ``client_keys``, or the list is malformed or empty.
    """
    if secret_file is None or allowed_file is None:
        return None
    return ServerKeys(_secret(Path(secret_file)), _allow_list(Path(allowed_file)))


def public_half(secret: bytes) -> bytes:
    """The public key that belongs to ``secret``."""
    import zmq  # here: a robot on rank 0's host needs neither keys nor ZeroMQ

    return zmq.curve_public(secret)


def make_pair(name: str, folder: Path) -> bytes:
    """Write ``name.secret`` and ``name.public`` into ``folder``; returns the public key.

    Raises:
        ConfigError: the name is not one, or one of the files exists: a key is never overwritten.
    """
    from zmq.auth.certs import create_certificates  # here: most processes make no keys

    _check_name(name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as own:  # nobody else can look into it
            files = create_certificates(own, name)
            public, secret = (Path(file).read_bytes() for file in files)
    except OSError as error:
        raise ConfigError([f"{folder}: no keys can be made there: {error.strerror}"]) from error
    _write_new(folder / f"{name}.secret", secret, SECRET_MODE)
    _write_new(folder / f"{name}.public", public, PUBLIC_MODE)
    return _public(folder / f"{name}.public")


def allow(allowed_file: Path, name: str, key: bytes) -> None:
    """Add a robot to the allow-list, which begins to exist with it.

    Raises:
        ConfigError: the name or the key is in the list, or is not one, or the list is full or
            cannot be written.
    """
    _check_name(name)
    text = _text(allowed_file) if allowed_file.exists() else ""
    allowed = dict(_allow_lines(allowed_file)) if text else {}
    if name in allowed.values() or key in allowed:
        what = f"{name!r} or its key stands there already; for another key delete that line first"
        raise ConfigError([f"{allowed_file}: {what}"])
    if len(allowed) == ROBOTS_MAX:
        raise ConfigError([f"{allowed_file}: has {ROBOTS_MAX} robots, and can have no more"])
    begin = "\n" if text and not text.endswith("\n") else ""  # as some editors leave it
    try:
        with allowed_file.open("a") as file:
            file.write(f"{begin}{name} {key.decode()}\n")
    except OSError as error:
        raise ConfigError([f"{allowed_file}: cannot be written: {error.strerror}"]) from error


def main(argv: Sequence[str] | None = None) -> int:
    """The command ``ppstream keys``."""
    args = _parser().parse_args(argv)
    try:
        if args.command == "new":
            print(make_pair(args.name, args.folder).decode())
        elif args.command == "public":
            print(public_half(_secret(args.file)).decode())
        else:
            key = (
                _public(args.key)
                if args.key.exists()
                else _checked(str(args.key), "the key (no such file)")
            )
            allow(args.list, args.name, key)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return int(error.exit_code)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ppstream keys", description="Keys for robots and servers on a network."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    new = commands.add_parser("new", help="make NAME.secret and NAME.public, print the public key")
    new.add_argument("name", help="of the robot or the server")
    new.add_argument("--folder", type=Path, default=Path(), help="gets both files (default: here)")
    public = commands.add_parser("public", help="print the public key of a .secret file")
    public.add_argument("file", type=Path, help="NAME.secret")
    listed = commands.add_parser("allow", help="add a robot to a list that is read at start")
    listed.add_argument("list", type=Path, help="file of the allow-list, made if it is not there")
    listed.add_argument("name", help="that the robot states")
    listed.add_argument("key", type=Path, help="its public key, or the .public file")
    return parser


def _secret(path: Path) -> bytes:
    _, key = _halves(path)
    if key is None:
        raise ConfigError([f"{path}: the public half of a pair, want its .secret file"])
    if path.stat().st_mode & OTHERS:
        raise ConfigError([f"{path}: others may read this secret key; chmod 600 {path}"])
    return _checked(key, str(path))


def _public(path: Path) -> bytes:
    key, _ = _halves(path)
    return _checked(key, str(path))


def _halves(path: Path) -> tuple[str, str | None]:
    """The public and the secret key of a certificate, unchecked; a bare key may be either."""
    from zmq.auth.certs import load_certificate  # here: most robots have no keys

    text = _text(path)
    try:
        public, secret = load_certificate(path)
    except (ValueError, IndexError):  # no public key in it, or a line without a value
        return text.strip(), text.strip()
    return _decoded(public), None if secret is None else _decoded(secret)


def _checked(text: str, where: str) -> bytes:
    """The key in ``text``; the text itself is not repeated: it may be a secret."""
    from zmq.utils import z85

    try:
        if len(text) == KEY_CHARACTERS and len(z85.decode(text)) == 32:
            return text.encode()
    except (KeyError, ValueError, struct.error):  # characters that Z85 has not, or no such number
        pass
    raise ConfigError([f"{where}: no key, want {KEY_CHARACTERS} characters of ppstream keys new"])


def _allow_list(path: Path) -> dict[bytes, str]:
    allowed = dict(_allow_lines(path))
    if not 1 <= len(allowed) <= ROBOTS_MAX:
        raise ConfigError([f"{path}: got {len(allowed)} robots, want 1 to {ROBOTS_MAX}"])
    return allowed


def _allow_lines(path: Path) -> Iterator[tuple[bytes, str]]:
    for number, line in enumerate(_text(path).splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):  # elsewhere '#' may be of a key
            continue
        if len(words) != 2:
            raise ConfigError([f"{path}:{number}: got {len(words)} words, want 'name key'"])
        _check_name(words[0])
        yield _checked(words[1], f"{path}:{number}"), words[0]


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError([f"{path}: cannot be read: {error.strerror}"]) from error
    if len(data) > FILE_BYTES_MAX:
        raise ConfigError([f"{path}: larger than {FILE_BYTES_MAX} bytes, so no key file"])
    return _decoded(data)


def _decoded(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def _check_name(name: str) -> None:
    allowed = name.replace("-", "").replace("_", "")
    if not (1 <= len(name) <= NAME_CHARACTERS and allowed.isalnum() and allowed.isascii()):
        raise ConfigError([f"name: got {name!r}, want 1 to 64 letters, digits, '-' or '_'"])


def _write_new(path: Path, data: bytes, mode: int) -> None:
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    except OSError as error:
        raise ConfigError([f"{path}: cannot be made: {error.strerror}"]) from error
    with os.fdopen(file, "wb") as writer:
        writer.write(data)


if __name__ == "__main__":
    sys.exit(main())
