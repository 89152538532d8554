"""Training: what both trainers share, PyTorch's (`convert/`) and MLX's, and the MLX one.

config.py       every setting of a training run, validated once
options.py      the commands' options
data.py         data folders, as mlx-lm's LoRA training takes them, to token ids
batches.py      bucketed batches, and the targets of every stream (eq. 5)
draft_vocab.py  the tokens that streams may guess
job.py          a run from its options to its last step
lower_store.py  what the frozen lower layers say, computed once and kept on disk
validation.py   losses and tokens per call of held-out examples
replay.py       held-out text replayed: tokens per target call, as the runtime would accept
record.py       the log of a run, and its picture

mlx_model.py    the stream-fused model in batches, as a function of its trained weights
mlx_losses.py   cross-entropy under the frozen head, a few rows of logits at a time
mlx_run.py      eq. 5, the optimiser's steps, and the saved state
"""
