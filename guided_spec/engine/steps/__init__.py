"""One step of an engine: planned, launched, and committed a round later."""
