"""Files of commands: bounded text as input, and output that is checked before long work starts and written completely or not
at all. Also addresses to listen on.
"""

from __future__ import annotations

import os
import select
import socket
import stat
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from outrider.device.errors import ConfigError
from outrider.errors import RequestError


def check_directory(option: str, path: Path, *, make: bool = True) -> None:
    """Raise :class:`ConfigError` if no files can be written in the directory ``path``, which ``option`` named.

    ``make``: create the directory if it is missing; otherwise a missing directory is an error.
    """
    try:
        if make:
            path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path) as file:
            file.write(b"\n")
    except (OSError, ValueError) as error:
        why = (getattr(error, "strerror", None) or str(error)).lower()
        raise ConfigError(
            f"{option} is {str(path)!r}, and no files can be written there: {why}; name a directory that you can write to"
        ) from None


def check_distinct(option: str, path: Path, others: Iterable[Path]) -> None:
    """Raise :class:`ConfigError` if writing ``path``, which ``option`` named, would replace one of the files ``others``."""
    if path.resolve() in {other.resolve() for other in others}:
        raise ConfigError(f"{option} is {str(path)!r}, another file of this command; name a file of its own")


def output_problem(path: Path, *suffixes: str) -> str | None:
    """Return why no file can be written at ``path``, or that its name ends in none of ``suffixes``; None: it can be
    written.
    """
    if suffixes and path.suffix not in suffixes:
        return f"expected a file that ends in {' or '.join(suffixes)}"
    if path.is_dir():
        return "which is a directory; name a file"
    if path.is_symlink() or (path.exists() and not path.is_file()):  # a device, a pipe, or a link to something
        return None
    try:
        with tempfile.TemporaryFile(dir=path.parent) as file:
            file.write(b"\n")
    except OSError as error:
        return f"nothing can be written in {str(path.parent)!r}: {error.strerror}; name a file elsewhere"
    return None


def write_whole(path: Path, text: str) -> None:
    """Write a file completely or not at all: a regular file is written under a temporary name and then renamed.

    An :class:`OSError` names ``path``, also if the disk is full.
    """
    try:
        if path.is_symlink() or (path.exists() and not path.is_file()):  # a device, a pipe, or a link to something
            path.write_text(text, encoding="utf-8")
            return
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            temporary.write_text(text, encoding="utf-8")
            if path.exists():
                temporary.chmod(path.stat().st_mode & 0o7777)
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise type(error)(error.errno, error.strerror, str(path)) from None


MAX_BYTES = 16 * 2**20
"""Maximum bytes of an input file: more than the text of any model's context."""

_PIPE_S = 10.0


def read_bounded(path: Path, what: str = "the text of a prompt", most: int = MAX_BYTES) -> bytes:
    """Return the bytes of a file with the content ``what``; ``-`` is standard input.

    Raises :class:`RequestError` for more than ``most`` bytes, such as an endless device, and for a named pipe that
    has no writer.
    """
    if str(path) == "-":
        return _within_bounds(sys.stdin.buffer.read(most + 1), path, what, most)
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # without it, a pipe without a writer would block here
    try:
        kind = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(kind):
            raise RequestError(f"{path}: is a directory; expected a file with {what}")
        if stat.S_ISFIFO(kind) and not select.select([descriptor], [], [], _PIPE_S)[0]:
            raise RequestError(f"{path}: is a pipe, and nothing was written to it within {_PIPE_S:g} s")
        os.set_blocking(descriptor, True)
        return _read(descriptor, path, what, most)
    finally:
        os.close(descriptor)


def read_text(path: Path, what: str = "the text of a prompt", most: int = MAX_BYTES) -> str:
    """Return the text of a file with the content ``what``.

    Raises :class:`RequestError` for a file that isn't UTF-8 text, and as :func:`read_bounded` does.
    """
    try:
        return read_bounded(path, what, most).decode("utf-8-sig")  # editors of Windows begin files with a mark
    except UnicodeDecodeError as error:
        raise RequestError(f"{path}: not UTF-8 text: {error.reason} at byte {error.start}; expected {what}") from None


def read_utf8(path: Path, what: str, most: int = MAX_BYTES) -> str:
    """Return the text of a file as :func:`read_text` does. Raises :class:`ConfigError`, also if the file can't be read."""
    try:
        return read_text(path, what, most)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}; expected a file with {what}") from error
    except RequestError as error:
        raise ConfigError(str(error)) from None


def _read(descriptor: int, path: Path, what: str, most: int) -> bytes:
    pieces: list[bytes] = []
    while sum(map(len, pieces)) <= most and (piece := os.read(descriptor, 2**20)):
        pieces.append(piece)
    return _within_bounds(b"".join(pieces), path, what, most)


def _within_bounds(data: bytes, path: Path, what: str, most: int) -> bytes:
    if len(data) > most:
        raise RequestError(f"{path}: has more than {most // 2**20} MiB; expected {what}")
    return data


def check_utf8(option: str, text: str) -> None:
    """Raise :class:`RequestError` for an argument that isn't UTF-8 text: Python turns its bytes into lone surrogates."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(f"{option}: not UTF-8 text at character {error.start}; use the encoding UTF-8") from None


def check_listening(options: str, host: str, port: int, *, family: int = socket.AF_UNSPEC) -> None:
    """Raise :class:`ConfigError` if no server can listen on ``host`` and ``port`` now. Port 0 is any free port.

    ``options``: the names of the options for the error message, such as ``--host and --port``. ``family``: the address family
    of a server that listens on one family only. The check does not reserve the port.
    """
    try:
        found = socket.getaddrinfo(host, port, family, socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for kind, _, protocol, _, address in found:
            try:
                tried = socket.socket(kind, socket.SOCK_STREAM, protocol)
            except OSError:  # this machine lacks the address family; servers skip it too
                continue
            with tried:
                tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # servers set it, to restart on the same port
                if kind == socket.AF_INET6:
                    tried.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                tried.bind(address)
                tried.listen()
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"nothing can listen at {host}, port {port}: {why}; choose another with {options}") from None
