"""The commands, and the options that they share.

| file | what it has |
|---|---|
| `options.py` | options of all commands, the settings and the model that they name; exit codes |
| `chat.py` | `ssmlx.chat` |
| `generate.py` | `ssmlx.generate` |
| `check.py` | `ssmlx.check`; calls timed before the first answer of a chat or server |
| `adapt.py` | `ssmlx.adapt` |
| `adapters.py` | `ssmlx.adapters` |
| `train.py` | `ssmlx.train` |
| `train_options.py` | the options of the training commands, from the fields of their settings |
| `upload.py` | `ssmlx.upload` |
| `caches.py` | `ssmlx.caches`, and `--prompt-cache FILE` of chat and generate |
| `drafting_lines.py` | lines that say what drafts and why, and what was learned of it |
| `machine.py` | the machine that a figure was measured on |
| `results.py` | results to the screen and into files |
"""
