"""From names and folders to weights on a model."""
