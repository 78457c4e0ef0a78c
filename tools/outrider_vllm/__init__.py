"""The simulated device as a platform of vLLM.

The run uses vLLM's unmodified scheduler, engine core, V2 model runner, attention, samplers, proposers and connectors. This
package copies no code of vLLM.
"""
