"""The engine: requests in, committed text out, over any stock transformers causal LM."""

from guided_spec.models.transformers_version import check_transformers

check_transformers()  # once, before anything here imports what transformers keeps inside
