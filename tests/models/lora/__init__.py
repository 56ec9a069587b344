"""Tests of models/lora."""
