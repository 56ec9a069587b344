"""One text in one grammar: its state, and what is filtered out of its rows."""
