"""Checks of the inputs of a command: bounded text from files and arguments, and addresses to listen on."""

from __future__ import annotations

import os
import select
import socket
import stat
import sys
from pathlib import Path

from outrider.device.errors import ConfigError
from outrider.errors import RequestError

MAX_BYTES = 16 * 2**20
"""More than any context holds."""

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
        return read_bounded(path, what, most).decode("utf-8")
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
