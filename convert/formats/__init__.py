"""Formats of published files, and of those that this package reads and writes."""
