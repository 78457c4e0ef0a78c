"""What kernels are measured on, and with: on the seam alone."""
