"""Heads that draft a whole block by one forward: layouts, the model and its parts, over slots."""
