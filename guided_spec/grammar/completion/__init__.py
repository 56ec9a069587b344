"""Texts that end in time: endings within a budget of tokens, for every grammar."""
