"""The decoding loops, on token ids: speculative decoding, and plain decoding beside it.

Both yield the same thing, so that one is the other's oracle and baseline.

Speculative Streaming for a chain (k = 1), in the symbols of the paper's section 3.2; row 0 of a
call is the root, row t the drafted token ~y[t]:

    root = the prompt's last token; ~y = []        # the first call verifies the root alone
    repeat:                                        # a target call
        M[0..] = layers 1 .. N - Ns on (root, ~y)  # lower: row t sees the text and rows <= t
        S[t, j] = f(M[t]) + P[j], j = 1 .. gamma   # insert: streams start (eq. 3)
        M, S = layers N - Ns + 1 .. N on M and S   # upper (eqs. 1 and 2)
        y[t + 1] = argmax H(M[t])                  # the target's own token behind row t
        delta = the most for which ~y[1 .. delta] = y[1 .. delta]    # accept (A.1)
        yield y[1 .. delta + 1]                    # the accepted tokens, and the correction
        the cache keeps rows 0 .. delta            # commit, advance
        root = y[delta + 1]
        ~y[j] = argmax H(S[delta, j]), j = 1 .. gamma                # propose

Beyond it: ~y is a tree, whose improbable nodes leave before `insert` (3.2.3); streams of row delta
alone run, in a second pass behind the call, unless `schedule=fused`; a sampled y is drawn by noise
that belongs to its place; and a controller may have another drafter propose ~y, or nothing.
"""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from ..model import metal
from ..model.cache import TreeCache
from ..model.stages import Tapped
from ..model.state_cache import StateCache
from ..model.streams import StreamFusedModel
from ..model.tree import PAD_TOKEN, Tree, root_tree
from ..settings import PREFILL_STEP_SIZE, AcceptanceConfig, PruneConfig
from .call import EXACT, NO_PRUNING, TargetCall, filled_taps, plain_call, verify_tree
from .chain import verify_chain
from .draft_shape import Always, Call, DraftController, DraftShape
from .drafter import Drafter, Taps
from .drafting import DraftingText
from .sampling import GREEDY, Sampling, TokenLogprobs, last_tokens, record_logprobs
from .stopwatch import PendingCall, Stopwatch

Stops = Callable[[list[int]], bool]
"""Given the tokens that a call advanced by: whether the answer ends with them."""


@dataclass(frozen=True)
class DraftCounts:
    """What came of one drafter's trees.

    Attributes:
        calls: target calls that verified one.
        drafted: tokens of these trees; neither roots nor padding (`PAD_TOKEN`) are drafted.
        accepted: of these, tokens that the target accepted.
        nodes: all nodes of these trees, roots and padding too: rows that the calls computed.
    """

    calls: int = 0
    drafted: int = 0
    accepted: int = 0
    nodes: int = 0


@dataclass
class CallCounts:
    """By drafter, the target calls that verified its trees, and how many tokens of these."""

    drafts: dict[str, DraftCounts] = field(default_factory=dict)  # by the drafter's name

    @property
    def drafted_tokens(self) -> int:
        """Tokens of all verified trees, accepted or not."""
        return sum(one.drafted for one in self.drafts.values())

    def add(self, drafter: str, nodes: int, drafted: int, accepted: int) -> None:
        """Count one target call that verified a tree.

        Args:
            drafter: name of the drafter that proposed the tree.
            nodes: all nodes of the tree, root and padding too.
            drafted: its tokens, neither root nor padding.
            accepted: of these, tokens that the target accepted.
        """
        before = self.drafts.get(drafter, DraftCounts())
        self.drafts[drafter] = DraftCounts(
            before.calls + 1,
            before.drafted + drafted,
            before.accepted + accepted,
            before.nodes + nodes,
        )


def never_stops(tokens: list[int]) -> bool:
    """False, whatever the tokens: endless decoding."""
    return False


def free_outgrown_buffers(cache: TreeCache, added: int) -> None:
    """Clear MLX's buffer cache where the committed tokens have passed a multiple of 256.

    mlx-lm does so too: a growing cache leaves buffers behind that are too small for it.

    Args:
        cache: its committed tokens are counted; it stays as it is.
        added: tokens that it has grown by since the last call of this function.
    """
    if cache.offset % 256 < added:
        mx.clear_cache()


def prefill(model: StreamFusedModel, tokens: list[int], cache: TreeCache) -> None:
    """Run `tokens` through the model and commit them to the cache, in pieces of the default
    size."""
    for _ in prefill_in_pieces(model, tokens, cache, PREFILL_STEP_SIZE):
        pass


def prefill_in_pieces(
    model: StreamFusedModel,
    tokens: list[int],
    cache: TreeCache,
    step_size: int,
    *,
    taps: tuple[int, ...] = (),
    tapped: Callable[[int, Taps], None] | None = None,
) -> Iterator[list[int]]:
    """Run a prompt through the model and commit it to the cache, a piece at a time.

    So whoever drives a decoding loop can stop between pieces, show progress, or let others go
    first. Each piece is waited for, and MLX's buffer cache is cleared behind it.

    Args:
        model: the target.
        tokens: of the prompt; they may be none.
        cache: holds what comes before them; gets their keys and values.
        step_size: tokens of a piece, at most.
        taps: layers whose input is wanted.
        tapped: called behind each piece, with its first token's index in `tokens` and the taps of
            its R rows, [1, R, D] by layer; None for not.

    Yields:
        An empty list before each piece, and one behind the last; nothing where there are no tokens.
    """
    for first in range(0, len(tokens), step_size):
        yield []
        found: Tapped = dict.fromkeys(taps)
        model.backbone.append(mx.array(tokens[first : first + step_size]), cache, found)
        mx.eval(cache.state)
        if tapped is not None:
            tapped(first, filled_taps(found))
        mx.clear_cache()
    if tokens:
        yield []


def plain_decode(
    model: StreamFusedModel,
    prompt: list[int],
    cache: TreeCache,
    *,
    context: Sequence[int] = (),
    sampler: Sampling = GREEDY,
    prefill_step_size: int = PREFILL_STEP_SIZE,
    logprobs: list[TokenLogprobs] | None = None,
) -> Iterator[list[int]]:
    """Decode plainly, endlessly: the same model without drafting.

    It never ends by itself: whoever iterates stops. As in mlx-lm, the next call is under way while
    its predecessor's token is read; a call whose token nobody asks for is wasted.

    Args:
        model: the target.
        prompt: one token or more; they follow what `cache` already holds.
        cache: paths that it has not counted yet are dropped. When a token is yielded, it holds the
            prompt and every token so far, that one included.
        context: the tokens that `cache` holds, for samplers that read the text.
        sampler: decides the target's tokens; greedy unless given.
        prefill_step_size: prompt tokens of a forward pass, at most.
        logprobs: gets an entry for every token before it is yielded, where the sampler's settings
            ask for log probabilities.

    Yields:
        Empty lists while the prompt is processed, then a list of one token for each target call.
    """
    cache.trim(cache.offset)
    tail = last_tokens([*context, *prompt[:-1]], sampler.context_size)
    yield from prefill_in_pieces(model, prompt[:-1], cache, prefill_step_size)
    call = plain_call(model, mx.array(prompt[-1:], mx.int32), tail, cache, sampler)
    mx.async_eval(call.arrays_to_read())
    while True:
        upcoming = plain_call(model, call.verified.root, call.tail, cache, sampler)
        mx.async_eval(upcoming.arrays_to_read())
        tokens = call.read()
        record_logprobs(logprobs, tokens, call.token_logprobs)
        yield tokens
        free_outgrown_buffers(cache, 1)
        call = upcoming


def speculative_decode(
    model: StreamFusedModel,
    prompt: list[int],
    cache: TreeCache,
    *,
    drafters: Sequence[Drafter],
    controller: DraftController | None = None,
    context: Sequence[int] = (),
    prune: PruneConfig = NO_PRUNING,
    sampler: Sampling = GREEDY,
    acceptance: AcceptanceConfig = EXACT,
    prefill_step_size: int = PREFILL_STEP_SIZE,
    stops: Stops = never_stops,
    logprobs: list[TokenLogprobs] | None = None,
    counts: CallCounts | None = None,
) -> Iterator[list[int]]:
    """Decode with drafts, endlessly: process the prompt, then verify a draft tree in each call.

    It never ends by itself: whoever iterates stops. Each call verifies the tree that was drafted
    behind its predecessor, or a bare root where nothing was; `controller` says what is drafted
    behind it.

    While a call runs, the next tree is drafted and its verification is built. Tokens are read when
    a tree is verified; while the drafting still runs, the next call is launched behind it, and only
    then are the tokens given out. So a GPU always has work, and the cache is written in place: MLX
    would copy it for a call that is launched while another may still read it. Drafters that need
    host tokens, and pruning by threshold, have to wait for the tokens first. So does the prompt's
    call: its token is the one that somebody waits for, and is given out before drafting starts.

    Args:
        model: a model with streams, or with any drafter that needs none.
        prompt: one token or more; they follow what `cache` already holds.
        cache: left holding the prompt and every yielded token but the last, or one more.
        drafters: what may draft, each under the name in its `largest` shape.
        controller: what to draft behind each call; unless given, always the first drafter's
            largest tree.
        context: the tokens that `cache` holds, for drafters and samplers that read the text.
        prune: which nodes to drop half-way up; off unless given.
        sampler: decides the target's tokens; greedy unless given.
        acceptance: when a drafted token counts as the target's; exact unless given.
        prefill_step_size: prompt tokens of a forward pass, at most.
        stops: given the tokens of a call before they are yielded: whether no more will be asked
            for. The next call is not launched then, and is not wasted.
        logprobs: gets an entry for every token before it is yielded, where the sampler's settings
            ask for log probabilities.
        counts: is added to with every call that verified a tree.

    Yields:
        Empty lists while the prompt is processed and where a drafter starts; then for each target
        call the ids that it advanced by: the accepted drafted tokens, and the target's own one
        behind them.
    """
    loop = _SpeculativeLoop(
        model,
        cache,
        [*[PAD_TOKEN] * (cache.offset - len(context)), *context, *prompt],
        {one.largest.drafter: one for one in drafters},
        controller or Always(drafters[0].largest),
        prune=prune,
        sampler=sampler,
        acceptance=acceptance,
        stops=stops,
        logprobs=logprobs,
        counts=counts or CallCounts(),
    )
    cache.trim(cache.offset)
    yield from loop.process_prompt(prompt, prefill_step_size)
    yield from loop.run_calls(prompt[-1])


@dataclass
class _NextCall:
    """The call behind the one under way, as far as it is prepared before that one is read."""

    drafts: DraftShape | None  # what is drafted behind the call under way
    tree: Tree | None = None  # that draft, or a bare root
    call: TargetCall | None = None  # the call that verifies it
    pending: PendingCall | None = None  # the same, launched
    before: TreeCache | None = None  # what the cache held before that call was built

    @property
    def shape(self) -> DraftShape | None:
        """The shape of the tree that it verifies; None for a bare root, also where a drafter had no
        draft.
        """
        has_draft = self.tree is not None and self.tree.num_nodes > 1
        return self.drafts if has_draft else None


class _SpeculativeLoop:
    """The state of one answer between its calls; see `speculative_decode`."""

    def __init__(
        self,
        model: StreamFusedModel,
        cache: TreeCache,
        tokens: list[int],
        drafters: Mapping[str, Drafter],
        controller: DraftController,
        *,
        prune: PruneConfig,
        sampler: Sampling,
        acceptance: AcceptanceConfig,
        stops: Stops,
        logprobs: list[TokenLogprobs] | None,
        counts: CallCounts,
    ) -> None:
        """Keep what an answer is decoded with, and begin its text with `tokens`; nothing runs yet.

        `tokens` are the whole text, those that the cache holds among them. `drafters` are by name;
        their class says what the other arguments are, see `speculative_decode`.
        """
        self.model = model
        self.cache = cache
        self.text = DraftingText(model, drafters, tokens)
        self.controller = controller
        self.prune = prune
        self.sampler = sampler
        self.acceptance = acceptance
        self.stops = stops
        self.logprobs = logprobs
        self.counts = counts
        self.watch = Stopwatch()
        self.drafting: list[mx.array] = []  # the tree that was drafted last

    def process_prompt(self, prompt: list[int], step_size: int) -> Iterator[list[int]]:
        """Commit the prompt but its last token to the cache, and start drafters.

        Those that need taps are started before, and follow each piece. Then the one that drafts
        first, where it needs host tokens.

        Args:
            prompt: one token or more.
            step_size: prompt tokens of a forward pass, at most.

        Yields:
            Empty lists: before each piece and behind the last, and before each call of a model that
            a drafter makes to start.
        """
        known = self.cache.offset
        taps = self.text.taps

        def follow(first: int, found: Taps) -> None:
            self.text.follow_taps(known + first, found)

        if taps:
            yield from self.text.start_tapping(known)
        tapped = follow if taps else None
        yield from prefill_in_pieces(
            self.model, prompt[:-1], self.cache, step_size, taps=taps, tapped=tapped
        )
        drafts = self.controller.next()
        if drafts is not None and self.text.needs_host_tokens(drafts):
            yield from self.text.bring_up_to_date(drafts.drafter)

    def run_calls(self, root: int) -> Iterator[list[int]]:
        """Run target calls, endlessly.

        Args:
            root: the prompt's last token, which the first call starts from.

        Yields:
            The tokens that each call advanced by; empty lists where a drafter starts.
        """
        tail = last_tokens(self.text.tokens[:-1], self.sampler.context_size)
        call = self.build_call(root_tree(mx.array([root], mx.int32)), tail)
        pending = self.launch(call)
        yield from self.text.start_text_followers()
        shape: DraftShape | None = None  # of the tree that `call` verifies
        is_prompts = True
        while True:
            # `call` is under way; all before it are read.
            following = yield from self.prepare_next_call(call, may_launch=not is_prompts)
            tokens = self.read_call(call, pending, shape, following, is_timed=not is_prompts)
            is_plain = following.pending is not None
            stopped = not is_plain and self.stops(tokens)
            if is_plain:
                yield from self.watch.yield_untimed(tokens)
            elif following.call is not None and not stopped:
                self.launch_prepared_call(call, following, len(tokens))
                yield from self.watch.yield_untimed(tokens)
            else:
                self.drop_prepared_call(call, following, len(tokens))
                # The first token, and the last, are given out before anything else starts.
                is_given = is_prompts or stopped
                if is_given:
                    yield from self.watch.yield_untimed(tokens)
                yield from self.draft_and_launch_next_call(call, following, len(tokens))
                if not is_given:
                    yield from self.watch.yield_untimed(tokens)
            metal.time_pending_shape()
            free_outgrown_buffers(self.cache, len(tokens))
            assert following.call is not None and following.pending is not None
            call = following.call
            pending = following.pending
            shape = following.shape
            is_prompts = False

    def build_call(self, tree: Tree, tail: mx.array) -> TargetCall:
        """Build the call that verifies `tree`.

        A plain call for a bare root, unless streams run beside each node, or the cache holds a path
        that is not counted yet. For a model without stages the tree is taken as a chain. Nothing is
        computed yet, unless pruning waits for the device.

        Args:
            tree: a draft, or a bare root.
            tail: [C] the last tokens before the root, as the sampler needs them.
        """
        streams = self.text.num_streams
        # A plain call appends to the committed tokens, so it cannot follow a path that is unread.
        if tree.num_nodes == 1 and not streams and not self.cache.paths:
            return plain_call(
                self.model, tree.tokens, tail, self.cache, self.sampler, self.text.taps
            )
        if isinstance(self.cache, StateCache):
            return verify_chain(
                self.model,
                tree,
                self.cache,
                sampler=self.sampler,
                acceptance=self.acceptance,
                tail=tail,
                taps=self.text.taps,
            )
        return verify_tree(
            self.model,
            tree,
            self.cache,
            num_streams=streams,
            prune=self.prune,
            sampler=self.sampler,
            acceptance=self.acceptance,
            tail=tail,
            taps=self.text.taps,
        )

    def launch(self, call: TargetCall, *, is_first: bool = False) -> PendingCall:
        """Start computing what `call` decides, without waiting for it.

        The cache is computed with it unless it is a plain call.

        Args:
            call: as `build_call` returned it.
            is_first: whether it follows drafting of which nothing was read yet, see `Stopwatch`.

        Returns:
            What `Stopwatch.read` needs.
        """
        state = [] if call.is_committed else [self.cache.state]
        return self.watch.launch(call.arrays_to_read(), *state, is_first=is_first)

    def prepare_next_call(
        self, call: TargetCall, *, may_launch: bool
    ) -> Generator[list[int], None, _NextCall]:
        """Do what can be done of the next call while `call` is under way.

        Where nothing is to be drafted behind a plain call, the next plain call is built and
        launched. A draft that needs no host tokens is made. With `may_launch`, unless pruning is
        by a threshold or the cache takes no trees, the drafting is launched too, and the call that
        verifies the draft is built on the cache, but not launched.

        Args:
            call: the one under way.
            may_launch: whether drafting may be launched before `call` is read.

        Yields:
            Empty lists, where a drafter starts.

        Returns:
            What is prepared, by a generator's return value. Only `drafts` is set where nothing is.
        """
        following = _NextCall(self.controller.next())
        drafts = following.drafts
        if drafts is None and call.is_committed:
            following.tree = root_tree(call.verified.root)
            following.call = self.build_call(following.tree, call.tail)
            following.pending = self.launch(following.call)
        elif drafts is not None and not self.text.needs_host_tokens(drafts):
            yield from self.text.bring_up_to_date(drafts.drafter)
            following.tree = self.text.propose(call, drafts)
            if may_launch and self.prune.kind != "threshold" and self.cache.takes_trees:
                following.before = self.cache.snapshot()
                following.call = self.build_call(following.tree, call.tail)
                mx.eval(self.drafting)  # done, mostly; else what the tree is drafted with is copied
                self.drafting = following.tree.arrays
                mx.async_eval(self.drafting)
        return following

    def read_call(
        self,
        call: TargetCall,
        pending: PendingCall,
        shape: DraftShape | None,
        following: _NextCall,
        *,
        is_timed: bool,
    ) -> list[int]:
        """Wait for the tokens that `call` advanced by, and tell everybody of them.

        Extends the text, which shows them to drafters that need host tokens; records log
        probabilities and counts; reports the call to the controller. Where no next tree is
        prepared, the controller decides again what is drafted. Where one was drafted, its drafter
        counts as having seen the text, and the hidden states of `call` are dropped. The cache is
        not changed.

        Args:
            call: under way.
            pending: the same, as it was launched.
            shape: of the tree that it verified; None for a bare root.
            following: what is prepared behind it; `drafts` may be changed.
            is_timed: whether the controller is told its time: not that of the prompt's call.

        Returns:
            The tokens' ids, one or more.
        """
        context = len(self.text.tokens) - 1
        tokens, seconds = self.watch.read(pending, call.read)
        self.text.extend(tokens, call.verified.accepted_taps())
        if following.tree is None:
            # Nothing is prepared, and drafters that had to wait for the tokens know more now.
            following.drafts = self.controller.next(is_read=True)
        elif following.drafts is not None:
            self.text.mark_seen(following.drafts.drafter)
            call.release()
        record_logprobs(self.logprobs, tokens, call.token_logprobs)
        if shape is not None:
            accepted = len(tokens) - 1
            self.counts.add(shape.drafter, call.num_nodes, call.num_drafted, accepted)
        timed = seconds if is_timed else None
        self.controller.record(Call(shape, len(tokens), context, timed, following.drafts))
        return tokens

    def launch_prepared_call(self, call: TargetCall, following: _NextCall, num_tokens: int) -> None:
        """Launch the call that was built before `call` was read, and commit the rows of `call`.

        Args:
            call: the call that was read. A plain one's row is committed already.
            following: holds the call that was built; gets it launched, and its snapshot of the
                cache is dropped.
            num_tokens: tokens that `call` advanced by.
        """
        following.before = None  # MLX writes in place only into what nobody else holds.
        assert following.call is not None
        if call.is_committed:
            mx.eval(self.drafting)  # the first drafting may have read all that the cache holds
        following.pending = self.launch(following.call, is_first=call.is_committed)
        if not call.is_committed:
            self.cache.advance(num_tokens)

    def drop_prepared_call(self, call: TargetCall, following: _NextCall, num_tokens: int) -> None:
        """Commit the rows of `call`; drop the call that was built before it was read, if one was.

        The cache gets back what it held before that one was built. The draft stays.

        Args:
            call: the call that was read. A plain one's row is committed already.
            following: what is prepared; its call and its snapshot of the cache are dropped.
            num_tokens: tokens that `call` advanced by.
        """
        if following.before is not None:
            self.cache.forget_masks()
            self.cache.restore(following.before)
            following.before = None
            following.call = None
        if not call.is_committed:
            self.cache.advance(num_tokens)

    def draft_and_launch_next_call(
        self, call: TargetCall, following: _NextCall, num_tokens: int
    ) -> Iterator[list[int]]:
        """Draft, build and launch the next call, now that the tokens of `call` are known.

        What was drafted already is not drafted again. Where `following.drafts` is None, a bare root
        takes the place of a draft.

        Args:
            call: the call that was read; its rows are committed.
            following: gets the tree, the call and its launch.
            num_tokens: tokens that `call` advanced by.

        Yields:
            Empty lists, where a drafter starts.
        """
        drafts = following.drafts
        is_on_device = drafts is not None and not self.text.needs_host_tokens(drafts)
        if drafts is None:
            following.tree = root_tree(call.verified.root)
        elif following.tree is None:
            # What a call advanced by is shown to those that draft on the device by the call itself.
            unseen = num_tokens if is_on_device else 0
            yield from self.watch.exclude_time(self.text.bring_up_to_date(drafts.drafter, unseen))
            following.tree = self.text.propose(call, drafts)
            self.text.mark_seen(drafts.drafter)
        if is_on_device:
            self.drafting = following.tree.arrays
            mx.async_eval(self.drafting)
        following.call = self.build_call(following.tree, call.tail)
        mx.eval(self.drafting)
        is_first = is_on_device and call.is_committed
        following.pending = self.launch(following.call, is_first=is_first)
