"""Tests of models/packed."""
