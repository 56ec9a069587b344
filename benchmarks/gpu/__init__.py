"""``python -m benchmarks.gpu``: kernels, engine steps, whole documents and other engines."""
