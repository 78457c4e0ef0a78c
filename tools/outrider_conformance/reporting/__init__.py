"""Verdicts of tests, causes of failures, waivers, and the report of a run."""
