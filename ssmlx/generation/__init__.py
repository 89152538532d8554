"""From settings to tokens: what an answer drafts with, what calls cost, and where memory goes."""
