"""The vendor kit: a suite of behavioural tests of a backend, by level, and the report of a run.

Run it with ``outrider conform --backend NAME``, or with
``pytest -p outrider_conformance.plugin --pyargs outrider_conformance --backend NAME``.
"""

from outrider_conformance.run import check, conform

__all__ = ["check", "conform"]
