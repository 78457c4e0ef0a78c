"""Exploration: scheduling strategies, delay schedules, and the search for a failing schedule."""
