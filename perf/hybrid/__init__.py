"""A hybrid of ten million parameters, trained here, and what drafts bring it.

text       what it learns from, and what is held out
schedule   how long and how fast it learns
head       the multi-token prediction head, in PyTorch
learn      trains the model and the head; the command is `train`: `python -m perf.hybrid.train`
figures    tokens per call, and what going back costs; the command is `measure`:
           `python -m perf.hybrid.measure`
"""
