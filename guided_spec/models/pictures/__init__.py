"""Pictures: a vision tower's features as rows of the embedding table, read like tokens."""
