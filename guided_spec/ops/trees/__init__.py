"""Trees of draft tokens, and paths through the lattices that they grow from."""
