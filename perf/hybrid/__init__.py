"""A hybrid of ten million parameters, trained here by `perf.hybrid.train`, and what drafts bring
it, by `perf.hybrid.measure`.
"""
