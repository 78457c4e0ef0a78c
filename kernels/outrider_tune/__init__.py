"""What kernels are measured on, and with: on the backend interface alone."""
