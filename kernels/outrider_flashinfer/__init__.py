"""FlashInfer behind the seam: attention that is planned on the host."""
