"""Host state of requests: parameters, scheduling and page numbers. Code in this package touches no device memory."""
