"""Training: what the trainers in PyTorch (`convert/`) and in MLX share, and the one in MLX.

| file | what it has |
|---|---|
| `config.py` | every setting of a training run, validated once |
| `data.py` | data folders to token ids; draft vocabularies; bucketed batches |
| `objective.py` | eq. 5's terms, tokens per call of held-out text, the frozen layers' outputs |
| `job.py` | a run from its options to its last step |
| `part_file.py` | the finished part of a long run, which a stopped one goes on behind |
| `record.py` | the log of a run, and its picture |
| `mlx_model.py` | the stream-fused model in batches, as a function of its trained weights |
| `mlx_trainer.py` | losses under the frozen head, the optimiser's steps, the saved state |
| `replay.py` | how many tokens a call would have brought on recorded answers |
| `adapt_workflow.py` | a model learns to draft for itself, in a run that can be stopped |
| `adapt_run.py` | such a run's options, its plan on disk, its model and its prompts |
| `adapt_plan.py` | what it makes: streams and batches by what is timed, rounds by the hours |
| `adapt_rounds.py` | a round: the model answers prompts, streams are trained on the answers |
| `adapt_check.py` | what the adapter brings: held-out prompts decoded with it and without |
| `progress.py` | how far such a run has come, and how long it will take yet |
| `sizing.py` | which streams a model should have, and how many answers fit into the hours |
| `questions.py` | prompts that ship, and questions that a model asks itself |
| `batch_responder.py` | what a model answers, many prompts at once |
"""
