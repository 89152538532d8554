"""A hybrid of ten million parameters, trained here, and what drafts bring it.

text       what it learns from, and what is held out
head       the multi-token prediction head, in PyTorch
train      python -m perf.hybrid.train: the model and the head
measure    python -m perf.hybrid.measure: tokens per call, and what going back costs
"""
