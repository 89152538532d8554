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

From an answer to its calls, on the thread that runs MLX; all but the first are generators:

    answers._SegmentSource                 closes at the last segment, an error, or `cancel`
     └─ segments  decode_segments          then computes the cache, and keeps what was learned
         ├─ segments  build_responses      reads the steps; has nothing to end, and is not closed
         └─ pool  claim_memory_while_decoding     then counts the answer no longer
             └─ batching  Batches.decode   then takes the answer out of its line, group and batch
                 └─ plan  decode_plan      is a loop: loop.speculative_decode, or loop.plain_decode

Each closes the one below it before it ends itself. Without an engine `decode_plan` stands directly
below `decode_segments`; in a chat, one of `session` stands above that. A generator that was never
asked for anything ends without any of this: its answer is counted in the pool as long as it lives.
"""
