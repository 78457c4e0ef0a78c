"""AMD GPUs through torch's HIP build."""
