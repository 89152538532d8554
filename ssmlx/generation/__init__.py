"""From settings to tokens: joins what drafts, what decides and what decodes.

| file | what it has |
|---|---|
| `plan.py` | `make_plan`: settings and model to a `Plan`; `decode_plan`: a `Plan` to a loop |
| `segments.py` | `plan_answer_segments`: a prompt to the segments of an answer |
| `answer_end.py` | where an answer ends, and its text until there: `StopChecker` |
| `default_head.py` | the head that drafts where nothing is asked for |
| `batching.py` | several open answers: in turns, or a row each in plain calls |
| `prompt_pieces.py` | how long a piece of a prompt is, and whether calls come before it |
| `learned.py` | what answers teach of calls' costs and of acceptance, and its file |
| `head_start.py` | costs that are timed before the first answer, for that file |
| `time_calls.py` | times calls that verify so many nodes, in the loop itself |
| `pool.py` | one bound for the memory of running answers and of what is kept |
| `memory.py` | where the memory goes: weights, caches, the room for trees |
| `scoring.py` | log probabilities of a prompt's tokens |
| `divergence.py` | where two answers part, and whether rounding explains it |
"""
