"""Arrays whose items must differ: where they are, and whether there are enough values."""
