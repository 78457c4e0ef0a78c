"""Timelines: when each operation ran, on which stream, and which fences held it. On the backend interface alone."""
