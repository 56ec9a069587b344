"""Grammars: what the user asks for, how it is compiled, and the position of one request in it."""
