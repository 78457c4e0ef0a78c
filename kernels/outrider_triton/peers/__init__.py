"""Collectives that write into the memory of other ranks' devices."""
