"""Grammars as tables of states over tokens: rows that are kept, steps that are looked up."""
