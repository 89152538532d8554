"""From settings to tokens: joins what drafts, what decides and what decodes.

On the thread that runs MLX an answer is a generator in generators, each of which closes the one
below before it ends: `decode_segments`, `Holding.follow`, `Batches.decode`, a loop.
"""
