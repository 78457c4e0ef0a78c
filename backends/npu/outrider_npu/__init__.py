"""Ascend NPUs through torch_npu."""
