"""The whole of this plugin's conformance test."""

from outrider_conformance import check


def test_threads_keeps_the_interface_promises() -> None:
    check("threads", level="L4")
