"""The verify decision: masked logits to accepted tokens, by every sampling setting."""
