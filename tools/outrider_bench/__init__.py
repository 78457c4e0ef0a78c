"""Benchmarks of Outrider, whose figures are ratios to a limit or to another system measured in the same run."""
