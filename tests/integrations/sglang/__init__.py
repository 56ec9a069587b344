"""Tests of integrations/sglang."""
