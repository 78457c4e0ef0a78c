"""Tests of level L1."""
