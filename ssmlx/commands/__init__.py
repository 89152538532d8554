"""The commands, and the options that they share.

| file | what it has |
|---|---|
| `parser.py` | the parser that every command has, and rows of options |
| `running.py` | how a command runs, ends and fails: exit codes, standard streams |
| `decoding_options.py` | options of a model and of how it decodes; the settings they come to |
| `load_target.py` | loads the model, adapter and drafter that options name |
| `callback_bars.py` | progress bars that are passed as a callback |
| `chat.py` | `ssmlx.chat` |
| `generate.py` | `ssmlx.generate` |
| `check.py` | `ssmlx.check`; calls timed before the first answer of a chat or server |
| `adapt.py` | `ssmlx.adapt` |
| `adapters.py` | `ssmlx.adapters` |
| `train.py` | `ssmlx.train` |
| `train_options.py` | the options of the training commands, from the fields of their settings |
| `upload.py` | `ssmlx.upload` |
| `caches.py` | `ssmlx.caches`, and `--prompt-cache FILE` of chat and generate |
| `answer_lines.py` | how answers are sampled on the loaded model, and the lines that say so |
| `drafting_lines.py` | lines that say what drafts and why, and what was learned of it |
| `machine.py` | the machine that a figure was measured on |
| `results.py` | results to the screen and into files |
"""
