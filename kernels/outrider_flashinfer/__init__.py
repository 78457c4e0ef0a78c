"""FlashInfer as a kernel set: attention that is planned on the host."""
