"""Kernels of the backend interface: the set in its three parts, its metadata, the torch references and their operators."""
