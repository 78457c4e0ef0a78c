"""The backend ``cuda``: NVIDIA GPUs through torch's CUDA module."""
