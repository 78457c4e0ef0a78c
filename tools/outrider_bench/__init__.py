"""Benchmarks: ratios to a limit, or to another system in the same run."""
