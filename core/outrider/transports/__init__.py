"""Transports, which transfer KV pages between engines: their interface, and the transports ``torch``, ``nixl`` and local."""

from outrider.transports.link import Link, LinkDown, PageTransfer, Transport

__all__ = ["Link", "LinkDown", "PageTransfer", "Transport"]
