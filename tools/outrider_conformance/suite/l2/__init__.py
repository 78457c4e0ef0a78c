"""Tests of level L2."""
