"""How long answers take on this machine, and which way to draft is fastest on it."""
