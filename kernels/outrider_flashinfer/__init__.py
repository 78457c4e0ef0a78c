"""The kernel set ``flashinfer``: FlashInfer's attention, planned on the host, around another kernel set."""
