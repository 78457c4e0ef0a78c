"""Checkpoints: files and their safety, the mapping of tensors to weights, and loading onto a device."""
