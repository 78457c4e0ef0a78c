"""The whole of this plugin's conformance test. Raise the level with what passes."""

from outrider.conformance import check


def test_version1_keeps_the_seams_promises() -> None:
    check("version1", level="L4")
