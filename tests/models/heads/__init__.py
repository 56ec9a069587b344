"""Tests of models/heads."""
