"""Tests of level L3."""
