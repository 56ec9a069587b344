"""What single kernels and forwards cost."""
