"""The decoding loops, stage by stage; they import no drafter, and neither plans nor costs.

| file | what it has |
|---|---|
| `loop.py` | `plain_decode` and `speculative_decode`: token ids in, a step for each call out |
| `step.py` | `Step`: what a call brought: tokens, their part of the answer, its draft's outcome |
| `call.py` | one target call: `verify` a tree, or a chain, or `plain_call` on one token |
| `prune.py` | early exit: improbable nodes leave half-way up (section 3.2.3) |
| `accept.py` | the longest drafted path that is the target's own (A.1) |
| `sampling.py` | how the target decides: penalties, filters, temperature, noise |
| `ranking.py` | the likeliest tokens of rows of logits, without a sort of whole rows |
| `draft_shape.py` | `DraftShape`, and the protocol of what decides on one; `Always`, `Never` |
| `drafter.py` | the protocol of drafters, and what they may read of a call |
| `drafting.py` | the drafters of one answer: what each has seen of the text |
| `batch.py` | plain calls with a row for each of several texts |
| `stopwatch.py` | how long a call takes |
"""
