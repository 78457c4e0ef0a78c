"""Measured tile configurations: candidates compiled and timed in a chain of layers."""
