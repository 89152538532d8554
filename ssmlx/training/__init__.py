"""Training: what both trainers share, PyTorch's (`convert/`) and MLX's, and the MLX one.

config.py       every setting of a training run, validated once
data.py         data folders to token ids; draft vocabularies; bucketed batches
objective.py    the terms of eq. 5; losses and tokens per call of held-out examples; what the
                frozen lower layers say, computed once and kept on disk
job.py          a run from its options to its last step
record.py       the log of a run, its picture and its bar

mlx_model.py    the stream-fused model in batches, as a function of its trained weights
mlx_trainer.py  losses under the frozen head, the optimiser's steps, and the saved state
"""
