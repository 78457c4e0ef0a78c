"""Kernels that compute row by row: norms, activations, rotation with the cache write, copies and embeddings."""
