"""Tests of integrations/transformers."""
