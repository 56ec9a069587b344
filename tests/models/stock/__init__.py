"""Tests of models/stock."""
