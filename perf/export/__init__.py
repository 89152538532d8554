"""Exported packages."""
