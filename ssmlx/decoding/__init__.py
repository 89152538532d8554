"""The decoding loops, stage by stage."""
