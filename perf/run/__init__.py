"""Code that all measurements share."""
