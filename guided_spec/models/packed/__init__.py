"""Models packed for CUDA graphs: fused weights, and kernels over slots."""
