"""The proof of the engine's fences: random host programs and random schedules, also with one fence left out."""
