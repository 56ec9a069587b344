"""Mask rows of a step: one constraint a request, one lookahead a step, and the row filler."""
