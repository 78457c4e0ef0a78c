"""NVIDIA GPUs through torch's CUDA module."""
