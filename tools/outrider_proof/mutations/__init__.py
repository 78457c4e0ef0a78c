"""Mutation tests of the proof: each mutant changes one place of the engine, and the host programs must detect it."""
