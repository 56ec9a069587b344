"""Tests of integrations/lmdeploy."""
