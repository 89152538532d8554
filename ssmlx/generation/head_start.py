"""Costs of calls that are timed before the first answer, for the table of this machine.

Answers teach the same costs as they go. A first answer that has the table knows at once which trees
pay, in place of finding out.
"""

import logging
from collections.abc import Sequence
from math import inf

from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..model.streams import StreamFusedModel
from ..policy.costs import ROWS
from ..prompts import encode
from .learned import learned_of
from .plan import Plan
from .time_calls import measure_costs

STREAMS = "streams"
"""The registered name of the drafter whose calls are timed, if the model has it."""
SIZES = (2, 4, 8, 16)
"""Nodes of the trees that are timed; costs between them are interpolated."""
SECONDS = 1.6
"""Seconds after which no other size is begun: plain calls of 45 ms leave time for all of them."""
_MOST_TOKENS = 32  # of the text that calls are timed after
_TEXT = """\
The first maps of the coast were drawn by sailors, who measured how long it took to pass from one
headland to the next, and wrote down where the water was deep enough for their ships. A line that
looked straight on paper could hide a bay, and an island could appear twice under two names. Later
maps were made on land. Two people with a long chain measured one side of a triangle, and after
that only angles, from hill to hill, until the whole country was covered with triangles."""
_log = logging.getLogger("ssmlx")


def sample_text(model: StreamFusedModel, tokenizer: TokenizerWrapper) -> list[int]:
    """The first tokens of a paragraph of prose, no more than half of the model's context."""
    room = model.backbone.context_length or 2 * _MOST_TOKENS
    return encode(_TEXT, tokenizer)[: min(_MOST_TOKENS, room // 2)]


def time_costs(
    model: StreamFusedModel,
    tokens: Sequence[int],
    sizes: Sequence[int],
    *,
    seconds: float,
    first_round_seconds: float = inf,
) -> dict[int, float]:
    """Time calls, and put their costs into this machine's table; plain calls by nodes."""
    timings = measure_costs(
        model, tokens, sizes, seconds=seconds, first_round_seconds=first_round_seconds
    )
    learned, _ = learned_of(model)
    context = len(tokens)
    name = STREAMS if model.num_streams else ROWS
    costs = {(name, size): cost for size, cost in timings.costs.items()}
    # What answers have taught of a size is worth more, and stays.
    learned.costs.set_head_start(costs, context, timings.plain_seconds)
    learned.keep(at_once=True)
    known = learned.costs.frozen(context)
    return {size: known.calls((name, size)) for size in timings.costs}


def time_head_start(
    model: StreamFusedModel,
    tokenizer: TokenizerWrapper,
    plan: Plan,  # of the answers to come, which is not run
) -> None:
    """Time calls once for a machine and a geometry; some two seconds, on the MLX thread."""
    names = {drafter.largest.drafter for drafter in plan.drafters}
    looks_up_text = any(drafter.needs.follows_from_start for drafter in plan.drafters)
    if plan.learned is None or not (STREAMS in names or looks_up_text):
        return
    tokens = sample_text(model, tokenizer)
    is_known = (
        plan.learned.costs.frozen(len(tokens)).largest_known(STREAMS if STREAMS in names else ROWS)
        > 0
    )
    if is_known or len(tokens) < 2:
        return
    found = time_costs(model, tokens, SIZES, seconds=SECONDS, first_round_seconds=SECONDS)
    costs = ", ".join(f"{size}: {cost:.2f}" for size, cost in found.items())
    if found:
        _log.debug("timed once, plain calls by nodes: %s; saved in %s", costs, plan.learned.path)
    else:
        _log.debug("calls take too long here to be timed before the first answer")
