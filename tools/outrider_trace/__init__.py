"""Timelines of a program: when each operation ran, on which stream, and which fences held it.

The package uses only the backend interface.
"""
