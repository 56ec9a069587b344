"""``LLM(engine="vllm")`` beside vLLM used directly."""
