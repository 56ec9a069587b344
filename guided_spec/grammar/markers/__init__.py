"""Markers in a text: where reasoning ends and a constraint begins."""
