"""A server under normal and hostile clients."""
