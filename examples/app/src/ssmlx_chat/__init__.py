"""A chat window with a model that drafts for itself."""
