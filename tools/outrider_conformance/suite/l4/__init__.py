"""Tests of level L4."""
