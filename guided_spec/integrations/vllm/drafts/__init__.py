"""What vLLM's drafters draw under grammars: heads, blocks, forced text and look-ups."""
