"""Random programs over the backend interface, checked against a model of its contract."""

DEFAULT_PROGRAMS = 300
"""Number of random programs that a run of the kit tries, over all levels."""
