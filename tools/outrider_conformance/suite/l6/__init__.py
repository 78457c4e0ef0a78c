"""Tests of level L6."""
