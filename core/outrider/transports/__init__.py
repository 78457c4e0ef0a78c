"""Transports, which transfer KV pages and recurrent states between engines: the interface, and the transports ``torch``,
``nixl`` and the one within a process.
"""

from outrider.transports.link import Link, LinkDown, PageTransfer, Transport

__all__ = ["Link", "LinkDown", "PageTransfer", "Transport"]
