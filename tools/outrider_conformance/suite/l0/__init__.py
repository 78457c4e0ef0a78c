"""Tests of level L0."""
