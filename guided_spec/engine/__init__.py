"""The engine: requests in, committed text out, over any stock transformers causal LM."""

from guided_spec.models.transformers_version import check_transformers

check_transformers()  # once, before anything here imports what transformers keeps inside

PROGRAM = (
    "import gc, signal; gc.disable(); signal.signal(signal.SIGINT, signal.SIG_IGN); "
    "from guided_spec.engine.process import serve; serve()"
)
"""What the process of an ``EngineProcess`` runs. Python's collector would take a third of the time
of its imports."""
