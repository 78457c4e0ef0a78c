"""Kernel measurement cases and timing, built on the backend interface alone."""
