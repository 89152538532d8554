"""The decoding loops, stage by stage. They import no drafter, and neither plans nor costs."""
