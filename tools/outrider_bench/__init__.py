"""Benchmarks of Outrider. Each figure is a ratio to a limit, or to another system measured in the same run."""
