"""The backend ``opencl``: OpenCL devices that share memory with the host."""
