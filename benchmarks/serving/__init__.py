"""HTTP servers under traffic: ours, vLLM's, or any other with OpenAI's interface."""
