"""Grammars: what the user asks for, how it is compiled, and where one request stands in it."""
