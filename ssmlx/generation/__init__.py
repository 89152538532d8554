"""From settings to tokens: joins drafters, controllers and decoding loops.

On the thread that runs MLX an answer is a generator in generators, each of which closes the one
below before it ends: `decode_segments`, `Holding.follow`, `Batches.decode`, a loop.
"""
