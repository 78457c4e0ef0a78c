"""The proof of the engine's fences: drawn host programs, drawn schedules, fences left out."""
