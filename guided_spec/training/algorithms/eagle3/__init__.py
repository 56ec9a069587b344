"""EAGLE-3: a decoder layer over features of several of the target's layers."""
