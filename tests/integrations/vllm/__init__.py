"""Tests of integrations/vllm."""
