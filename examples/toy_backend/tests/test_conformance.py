"""The whole of this plugin's conformance test. Raise the level with what passes."""

from outrider_conformance import check


def test_toy_keeps_the_interface_promises() -> None:
    check("toy", level="L4")
