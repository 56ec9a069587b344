"""The target of an engine, in its two forms, and what its forwards read."""
