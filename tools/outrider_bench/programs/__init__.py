"""Measurements that are run by hand: ``python -m outrider_bench.programs.NAME``."""
