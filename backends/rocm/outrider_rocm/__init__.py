"""The backend ``rocm``: AMD GPUs through torch's HIP build."""
