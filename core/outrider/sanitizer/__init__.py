"""The sanitizer: finds missing, stale and misplaced orderings between streams, host threads and graph replays."""
