"""The decoding loops, on token ids: Speculative Streaming, and plain decoding beside it.

Both yield the same thing, so that one is the other's oracle and baseline.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import mlx.core as mx

from ..model import metal
from ..model.cache import TreeCache
from ..model.shapes import indices, to_list
from ..model.streams import StreamFusedModel
from ..model.tree import PAD_TOKEN, Tree, root_tree
from ..settings import PREFILL_STEP_SIZE, AcceptanceConfig, PruneConfig
from .accept import Acceptance, accept, accept_typical
from .drafter import Drafter, Noise, Verified, with_noise
from .pace import Pace, Rung
from .prune import is_pruned, surviving_nodes, transition_logprobs
from .sampling import GREEDY, Places, Sampling, TokenLogprobs, last_tokens, places_of, tell_logprobs
from .stopwatch import Launch, Stopwatch

Ends = Callable[[list[int]], bool]
"""Told the tokens that a call advanced by; whether the answer ends with them."""

EXACT = AcceptanceConfig()

Spell = Generator[list[int], None, tuple[mx.array, mx.array]]
"""Calls of one kind, the tokens of each; at last the newest token [1], and the tail before it."""


def never(tokens: list[int]) -> bool:
    """Endless decoding."""
    return False


def release_outgrown(cache: TreeCache, added: int) -> None:
    """Every 256 tokens, as in mlx-lm, free the buffers that a growing cache has left behind."""
    if cache.offset % 256 < added:
        mx.clear_cache()


def prefill(model: StreamFusedModel, tokens: list[int], cache: TreeCache) -> None:
    """Put `tokens` into the cache."""
    for _ in prefill_turns(model, tokens, cache, PREFILL_STEP_SIZE):
        pass


def prefill_turns(
    model: StreamFusedModel, tokens: list[int], cache: TreeCache, step_size: int
) -> Iterator[list[int]]:
    """Put `tokens` into the cache, `step_size` at a time: an empty list before each, and at last.

    So whoever drives a decoding loop can stop between them, tell of them, or let others go first.
    """
    for first in range(0, len(tokens), step_size):
        yield []
        model.backbone.append(mx.array(tokens[first : first + step_size]), cache)
        mx.eval(cache.state)
        mx.clear_cache()
    if tokens:
        yield []


def prune_tree(
    model: StreamFusedModel, tree: Tree, hidden: mx.array, config: PruneConfig, noise: Noise = None
) -> tuple[Tree, mx.array, mx.array]:
    """The tree that is left, its hidden states [1, M, D], and the old index of each node [M].

    `noise` [P, V] is known of what is decided behind each depth, see `Sampling.noise`.
    """
    if not is_pruned(tree, config):
        return tree, hidden, indices(tree.num_nodes)
    exit_logits = model.early_exit_logits(hidden[:, : tree.num_internal])
    if noise is not None:
        exit_logits = with_noise(exit_logits, noise[tree.depths[: tree.num_internal]])
    (edges,) = model.backbone.agreed(transition_logprobs(tree, exit_logits))
    keep = surviving_nodes(tree, edges, config)
    return tree.select(keep), hidden[:, keep], keep


def choose(
    model: StreamFusedModel, logits: mx.array, sampler: Sampling, places: Places
) -> mx.array:
    """[R] the target's token after each row of `logits` [R, V], see `Sampling.choose`."""
    return model.backbone.agreed(sampler.choose(logits, places))[0]


def settle(
    model: StreamFusedModel,
    tokens: mx.array,
    logits: mx.array,
    sampler: Sampling,
    places: Places,
    row: mx.array,
) -> mx.array:
    """What `choose` gave, with the token of `row` [1] decided where it was left open."""
    if not sampler.leaves_open:
        return tokens
    return model.backbone.agreed(sampler.settle(tokens, logits, places, row))[0]


def verify(
    model: StreamFusedModel,
    tree: Tree,
    logits: mx.array,
    sampler: Sampling,
    places: Places,
    acceptance: AcceptanceConfig,
) -> tuple[mx.array, Acceptance]:
    """The target's token after each node [M], of its `logits` [M, V], and how far the tree
    holds."""
    if acceptance.kind == "exact":
        target_tokens = choose(model, logits, sampler, places)
        found = accept(tree, target_tokens)
        if sampler.leaves_open:
            target_tokens = settle(model, target_tokens, logits, sampler, places, found.last)
            found = replace(found, new_tokens=target_tokens[found.path])
        return target_tokens, found
    logprobs = sampler.logprobs(logits, places)
    target_tokens = mx.argmax(sampler.perturb(logprobs, places), axis=-1).astype(mx.int32)
    found = accept_typical(tree, target_tokens, logprobs, acceptance)
    agreed = model.backbone.agreed(target_tokens, found.path, found.new_tokens, found.num_accepted)
    return agreed[0], Acceptance(*agreed[1:])


def agreed_tree(model: StreamFusedModel, tree: Tree) -> Tree:
    """The tree that rank 0 drafted, where the model is split over ranks."""
    if model.backbone.group is None:
        return tree
    tokens, depths, paths = model.backbone.agreed(tree.tokens, tree.depths, tree.paths)
    return replace(tree, tokens=tokens, depths=depths, paths=paths)


def stream_rows_of(rows: mx.array, node: mx.array, num_nodes: int, num_streams: int) -> mx.array:
    """[1, G, D] the streams of `node` [1] among the upper rows [1, M * (1 + G), D]."""
    own = num_nodes + node[:, None] * num_streams + indices(num_streams)
    return rows[:, own[0]]


@dataclass(frozen=True, eq=False)
class StepResult:
    """What one target call leaves on the device."""

    acceptance: Acceptance  # how far the tree held
    next_tree: Tree  # the tree to verify next
    tail: mx.array  # [C] the last tokens before its root, as the sampler needs them
    for_host: mx.array  # [1 + P] accepted nodes below the root, then `acceptance.new_tokens`
    told: mx.array | None  # [P, 1 + 2 T] log probabilities of the latter, see `Sampling.told`
    num_drafted: int  # nodes of the verified tree below its root

    def decided(self) -> list[mx.array]:
        """What the host will read, and the next tail: all of it before the next tree is drafted."""
        return [self.for_host, self.tail, *([] if self.told is None else [self.told])]

    def drafted(self) -> list[mx.array]:
        """The next tree."""
        return [self.next_tree.tokens, self.next_tree.depths, self.next_tree.paths]

    def read(self) -> list[int]:
        """The tokens that the call advanced by: the step's one read, which waits for it."""
        num_accepted, *new_tokens = to_list(self.for_host)
        return new_tokens[: num_accepted + 1]


def scratch_rows(drafter: Drafter) -> int:
    """Rows that a cache needs before the committed ones for the largest step of a drafter.

    A step that is built ahead also has the path of the one before it.
    """
    path = 0 if drafter.waits else drafter.num_levels + 1
    return drafter.max_nodes * (1 + drafter.num_streams) + path


def step(
    model: StreamFusedModel,
    tree: Tree,
    cache: TreeCache,
    drafter: Drafter,
    prune: PruneConfig,
    sampler: Sampling = GREEDY,
    *,
    acceptance: AcceptanceConfig = EXACT,
    tail: mx.array | None = None,
) -> StepResult:
    """One target call: verify `tree` and draft the next (sections 3.2.1 to 3.2.3, figure 7).

    `tail` [C] holds the last tokens before the tree's root, for samplers that need them.
    """
    num_streams = drafter.num_streams
    split = model.insertion_layer
    tail = last_tokens((), sampler.context_size) if tail is None else tail
    cache.reserve(tokens=tree.paths.shape[1], scratch=tree.num_nodes * (1 + num_streams))

    nodes = model.node_rows(tree, cache)
    hidden = model.lower(tree, cache, nodes)
    position = cache.length
    known = sampler if acceptance.kind == "exact" else GREEDY
    noise = known.noise(position, tree.paths.shape[1])
    kept, hidden, kept_index = prune_tree(model, tree, hidden, prune, noise)
    rows = model.insert(hidden, num_streams)
    rows = model.upper(rows, kept, cache, num_streams, nodes if kept is tree else None)
    node_hidden = rows[:, : kept.num_nodes]
    places = places_of(kept, position, tail)
    logits = model.backbone.logits(node_hidden)
    target_tokens, accepted = verify(model, kept, logits, sampler, places, acceptance)
    lower_path = accepted.path if kept is tree else kept_index[accepted.path]
    cache.commit(lower_path, accepted.path, split, accepted.num_accepted + 1)
    own_streams = stream_rows_of(rows, accepted.last, kept.num_nodes, num_streams)
    verified = Verified(
        kept, target_tokens, accepted, node_hidden, own_streams, hidden, position, cache
    )
    next_tree = agreed_tree(model, drafter.propose(verified))
    next_tail = places.tail_at(accepted.last)
    for_host = mx.concatenate([accepted.num_accepted, accepted.new_tokens])
    told = sampler.told(logits, places, accepted.path, accepted.new_tokens)
    return StepResult(accepted, next_tree, next_tail, for_host, told, tree.num_nodes - 1)


def streaming_decode(
    model: StreamFusedModel,
    prompt: list[int],
    cache: TreeCache,
    *,
    drafter: Drafter,
    context: Sequence[int] = (),
    prune: PruneConfig | None = None,
    sampler: Sampling = GREEDY,
    acceptance: AcceptanceConfig = EXACT,
    prefill_step_size: int = PREFILL_STEP_SIZE,
    ends: Ends = never,
    pace: Pace | None = None,
    told: list[TokenLogprobs] | None = None,
) -> Iterator[list[int]]:
    """Yield the tokens that each target call advances by, endlessly, behind `prefill_turns`.

    What is drafted, and whether anything is, `pace` decides from call to call.

    Args:
        model: a model with streams, or with any drafter that needs none.
        prompt: one token or more; they follow what `cache` already holds.
        cache: left holding the prompt and every yielded token but the last.
        drafter: proposes each next tree, but where a rung of `pace` has a drafter of its own.
        context: the tokens that `cache` holds, for drafters and samplers that read the text.
        prune: which nodes to drop half-way up; off unless told.
        sampler: decides the target's tokens; greedy unless told.
        acceptance: when a drafted token counts as the target's; exact unless told.
        ends: told the tokens before they are yielded: whether no more will be asked for. The next
            step is not started then, and is not wasted.
        pace: says what to draft; always, with `drafter`, unless told. Others are for drafters that
            need not see every call.
        told: gets an entry for every token before it is yielded, where the sampler's settings ask
            for log probabilities.

    The prompt's last token is the first tree: a bare root, whose step drafts like any other.
    """
    prune = prune or PruneConfig()
    pace = pace or Pace()
    watch = Stopwatch()
    text = [*context, *prompt]
    unknown = [PAD_TOKEN] * (cache.offset - len(context))
    cache.trim(cache.offset)
    root = mx.array(prompt[-1:], mx.int32)
    tail = last_tokens(text[:-1], sampler.context_size)
    yield from prefill_turns(model, prompt[:-1], cache, prefill_step_size)

    def build(tree: Tree, tail: mx.array, rung: Rung) -> StepResult:
        own = rung.drafter or drafter
        return step(model, tree, cache, own, prune, sampler, acceptance=acceptance, tail=tail)

    builds_ahead = not drafter.waits and prune.kind != "threshold"
    while True:
        if pace.rung is None:
            root, tail = yield from plain_spell(
                model, root, tail, cache, sampler, text, told, pace, watch
            )
        else:
            yield from drafter.start([*unknown, *text]) or ()
            root, tail = yield from drafting_spell(
                build, root, tail, cache, ends, text, told, pace, watch, builds_ahead
            )


def drafting_spell(
    build: Callable[[Tree, mx.array, Rung], StepResult],
    root: mx.array,
    tail: mx.array,
    cache: TreeCache,
    ends: Ends,
    text: list[int],
    told: list[TokenLogprobs] | None,
    pace: Pace,
    watch: Stopwatch,
    builds_ahead: bool,
) -> Spell:
    """Steps as `build` builds them, the first of a bare root, until nothing is to be drafted.

    What they decide goes on `text`.

    While a step runs, the next one is built. A step's tokens are read when its tree is verified;
    while it still drafts, its successor is launched behind it, and only then are they given out. So
    a GPU always has work, and the cache is written in place: MLX would copy it for a step that is
    launched while another may still read it. Drafters that read the text, and pruning by threshold,
    have to know the tokens first. So does the prompt's call: its token is the one that somebody
    waits for, and is given out before anything else is started, drafting too; what waits for the
    text has drafted by then, and a draft model has read the prompt.
    """
    verified = None
    rung = pace.rung
    assert rung is not None
    result = build(root_tree(root), tail, rung)
    drafted = None
    launch = watch.launch(result.decided(), cache.state)
    while True:
        before = cache.hold()
        upcoming = None
        next_rung = pace.rung
        assert next_rung is not None
        if builds_ahead and drafted is not None:
            upcoming = build(result.next_tree, result.tail, next_rung)
            mx.eval(drafted)  # done, mostly; else what this step drafts with would be copied
            drafted = result.drafted()
            mx.async_eval(drafted)
        new_tokens, seconds = watch.read(launch, result.read)
        text.extend(new_tokens)
        tell_logprobs(told, new_tokens, result.told)
        pace.num_drafted += result.num_drafted
        pace.observe(len(new_tokens), verified=verified, seconds=seconds)
        if upcoming is None or pace.rung is None or ends(new_tokens):
            if upcoming is not None:
                upcoming = None
                cache.forget_masks()
            cache.restore(before)
            cache.advance(len(new_tokens))
            yield from watch.away(new_tokens)
            if pace.rung is None:
                return result.acceptance.correction, result.tail
            next_rung = pace.rung
            drafted = result.drafted()
            mx.async_eval(drafted)
            upcoming = build(result.next_tree, result.tail, next_rung)
            mx.eval(drafted)  # The first drafting may have read all that the cache holds.
            launch = watch.launch(upcoming.decided(), cache.state, is_first=True)
        else:
            del before  # MLX writes in place only into what nobody else holds.
            launch = watch.launch(upcoming.decided(), cache.state)
            cache.advance(len(new_tokens))
            yield from watch.away(new_tokens)
        metal.settle()
        release_outgrown(cache, len(new_tokens))
        result = upcoming
        verified = rung
        rung = next_rung


def plain_spell(
    model: StreamFusedModel,
    root: mx.array,
    tail: mx.array,
    cache: TreeCache,
    sampler: Sampling,
    text: list[int],
    told: list[TokenLogprobs] | None = None,
    pace: Pace | None = None,
    watch: Stopwatch | None = None,
) -> Spell:
    """Calls of one row, until `pace` has something to draft; what they decide goes on `text`.

    As in mlx-lm, the next call is under way while its predecessor's token is read; a call whose
    token nobody asks for is wasted, and not counted.
    """
    watch = watch or Stopwatch()

    def call(token: mx.array, tail: mx.array) -> tuple[mx.array, mx.array, mx.array | None, Launch]:
        places = places_of(root_tree(token), cache.length, tail)
        logits = model.backbone.logits(model.backbone.append(token, cache))
        chosen = choose(model, logits, sampler, places)
        chosen = settle(model, chosen, logits, sampler, places, indices(1))
        rows = sampler.told(logits, places, indices(1), chosen)
        launch = watch.launch(chosen, *([] if rows is None else [rows]))
        return chosen, places.tail_at(indices(1)), rows, launch

    token, tail, rows, launch = call(root, tail)
    is_first = True
    while True:
        is_last = pace is not None and pace.rung is not None
        upcoming = None if is_last else call(token, tail)
        new_tokens, seconds = watch.read(launch, partial(to_list, token))
        text.extend(new_tokens)
        tell_logprobs(told, new_tokens, rows)
        if pace is not None:
            pace.observe(1, seconds=None if is_first or is_last else seconds)
        is_first = False
        yield from watch.away(new_tokens)
        release_outgrown(cache, 1)
        if upcoming is None:
            return token, tail
        token, tail, rows, launch = upcoming


def plain_decode(
    model: StreamFusedModel,
    prompt: list[int],
    cache: TreeCache,
    *,
    context: Sequence[int] = (),
    sampler: Sampling = GREEDY,
    prefill_step_size: int = PREFILL_STEP_SIZE,
    told: list[TokenLogprobs] | None = None,
) -> Iterator[list[int]]:
    """Yield one token for each target call, endlessly: the same model without drafting.

    The arguments are `streaming_decode`'s.
    """
    cache.trim(cache.offset)
    root = mx.array(prompt[-1:], mx.int32)
    text = [*context, *prompt]
    tail = last_tokens(text[:-1], sampler.context_size)
    yield from prefill_turns(model, prompt[:-1], cache, prefill_step_size)
    yield from plain_spell(model, root, tail, cache, sampler, text, told)
