"""``python -m benchmarks.vllm_engine``: see ``run``."""

from benchmarks.vllm_engine.run import app

app()
