"""What both trainers share, PyTorch's (`convert/`) and MLX's (`ssmlx.train`): no framework here.

config.py       every setting of a training run, validated once
data.py         data folders, as mlx-lm's LoRA training takes them, to token ids
batches.py      bucketed batches, and the targets of every stream (eq. 5)
draft_vocab.py  the tokens that streams may guess
replay.py       held-out text replayed: tokens per target call, as the runtime would accept
record.py       the log of a run, and its picture
"""
