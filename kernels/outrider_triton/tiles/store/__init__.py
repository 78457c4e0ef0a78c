"""Stored tile configurations: tables that ship with the package, and choices measured on one machine."""
