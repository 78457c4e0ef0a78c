"""Kernels from outside of Outrider: `kernels` computes, `plugin` is how they are found, `bench` measures."""
