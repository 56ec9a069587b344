"""JSON schemas: what can be enforced of one, and in which words the backends take it."""
