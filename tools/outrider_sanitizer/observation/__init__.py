"""Observation of accesses and orders: reports of backends, operators of torch, numpy, Triton, and host threads."""
