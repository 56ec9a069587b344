"""Tests of ops/sampling."""
