"""The torch device: dispatch of torch calls to queued operations, tensors, and the module `torch.sim`."""
