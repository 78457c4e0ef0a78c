"""Where a server is to listen, looked at before its model is loaded."""

from __future__ import annotations

import socket

from outrider.device.errors import ConfigError


def check_listening(options: str, host: str, port: int, *, family: int = socket.AF_UNSPEC) -> None:
    """Raise :class:`ConfigError` where nothing can listen at ``host`` and ``port`` now; port 0 is one that is free.

    ``options``: those that gave them, such as ``--host and --port``. ``family``: of addresses, where the server takes one
    alone. Nothing is held: who comes before the server has the port.
    """
    try:
        places = socket.getaddrinfo(host, port, family, socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for kind, _, protocol, _, address in places:
            try:
                tried = socket.socket(kind, socket.SOCK_STREAM, protocol)
            except OSError:  # a family that this machine doesn't have; servers pass it over, too
                continue
            with tried:
                tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do, which may begin again at once
                if kind == socket.AF_INET6:
                    tried.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                tried.bind(address)
                tried.listen()
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"nothing can listen at {host}, port {port}: {why}; choose another with {options}") from None
