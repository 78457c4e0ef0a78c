"""Timelines of a program: when each operation ran, on which stream, and for which fences it waited.

The package uses only the backend interface.
"""
