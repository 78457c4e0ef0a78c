"""Tests of level L5."""
