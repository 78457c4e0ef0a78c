"""Ports for servers that tests start."""

import socket


def free_port() -> int:
    """Return a port of 127.0.0.1 that no process listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port
