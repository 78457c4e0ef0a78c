"""Failure recovery of an engine whose device fails or hangs."""
