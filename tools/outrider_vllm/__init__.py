"""The simulated device as a platform of vLLM.

Everything but this package is vLLM's own and unmodified: scheduler, engine core, V2 model runner, attention, samplers,
proposers, connectors. Nothing of it is copied here.
"""
