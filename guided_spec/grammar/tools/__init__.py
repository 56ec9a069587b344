"""Tool calls: the formats of model families, their grammars and their readers."""
