"""Tables of grammars, held against the matchers that they stand for."""
