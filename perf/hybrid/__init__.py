"""A hybrid of ten million parameters, trained here, and what drafts bring it.

text       what it learns from, and what is held out
head       the multi-token prediction head, in PyTorch
train      trains the model and the head: `python -m perf.hybrid.train`
measure    tokens per call, and what going back costs: `python -m perf.hybrid.measure`
"""
