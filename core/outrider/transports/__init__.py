"""How bytes get from one engine's pages into another's: what a transport promises, and the transports that come along."""

from outrider.transports.link import Link, LinkDown, Transfer, Transport

__all__ = ["Link", "LinkDown", "Transfer", "Transport"]
