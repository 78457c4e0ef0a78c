"""Simulated ranks: collectives, a store, and `torch.distributed` between host threads."""
