"""Run test programs on several ranks, in one process or in one process each."""
