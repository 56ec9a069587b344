"""The page at ``/``: a prompt, a grammar, and every step of the answer as it is written."""
