"""The backend ``npu``: Ascend NPUs through torch_npu."""
