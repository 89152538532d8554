"""The decoding loops, on token ids: speculative decoding, and plain decoding, its oracle.

Speculative Streaming for a chain (k = 1), in the symbols of the paper's section 3.2; row 0 of a
call is the root, row t the drafted token ~y[t]:

    root = the prompt's last token; ~y = []        # the first call verifies the root alone
    repeat:                                        # a target call
        M[0..] = layers 1 .. N - Ns on (root, ~y)  # lower: row t sees the text and rows <= t
        S[t, j] = f(M[t]) + P[j], j = 1 .. gamma   # insert: streams start (eq. 3)
        M, S = layers N - Ns + 1 .. N on M and S   # upper (eqs. 1 and 2)
        y[t + 1] = argmax H(M[t])                  # the target's own token after row t
        delta = the most for which ~y[1 .. delta] = y[1 .. delta]    # accept (A.1)
        yield y[1 .. delta + 1]                    # the accepted tokens, and the correction
        the cache keeps rows 0 .. delta            # hold, commit
        root = y[delta + 1]
        ~y[j] = argmax H(S[delta, j]), j = 1 .. gamma                # propose

Beyond it: ~y is a tree, whose improbable nodes leave before `insert` (3.2.3); streams of row delta
alone run, in a second pass after the call, unless `schedule=fused`; a sampled y is drawn by noise
that belongs to its position; and a controller may have another drafter propose ~y, or nothing.
"""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx

from ..model import metal
from ..model.streams import StreamFusedModel
from ..model.text_cache import CACHE_STEP, TextCache
from ..model.tree import PAD_TOKEN, Tree, root_tree
from ..settings import PREFILL_STEP_SIZE, AcceptanceConfig, PruneConfig
from .call import EXACT, NO_PRUNING, TargetCall, plain_call, verify
from .draft_shape import Always, CallRecord, DraftController, DraftShape
from .drafter import Drafter, Taps
from .drafting import DraftingText
from .sampling import GREEDY, Sampling, last_tokens
from .step import DraftResult, Step, Steps, Take, take_all
from .stopwatch import PendingCall, Stopwatch

StepSize = int | Callable[[], int]
"""Most tokens of a piece of a prompt; or a function that is asked for it before each piece."""


@dataclass(frozen=True)
class PromptPlace:
    """An offset in a prompt where a piece ends, so that the text up to there can be kept."""

    offset: int  # tokens of the whole text before it
    # called when the cache holds these and no more, also before anything is processed; not if it
    # holds more from the beginning. What it raises ends the loop.
    keep: Callable[[], None]


def clear_unused_buffers(
    cache: TextCache,
    added: int,  # tokens that `cache` has grown by since the last call
) -> None:
    """Free all of MLX's unused buffers whenever the text crosses a multiple of `CACHE_STEP`."""
    # As mlx-lm does. `cache` has outgrown some of them.
    if cache.offset % CACHE_STEP < added:
        mx.clear_cache()


def prefill(model: StreamFusedModel, tokens: list[int], cache: TextCache) -> None:
    """Run tokens through the model and commit them to the cache."""
    for _ in prefill_in_pieces(model, tokens, cache, PREFILL_STEP_SIZE):
        pass


def prefill_in_pieces(
    model: StreamFusedModel,
    tokens: list[int],
    cache: TextCache,
    step_size: StepSize,
    *,
    taps: tuple[int, ...] = (),  # layers whose input is wanted
    # called after each piece: its first token's index in `tokens`, and [1, R, D] by layer
    on_taps: Callable[[int, Taps], None] | None = None,
    place: PromptPlace | None = None,
) -> Iterator[None]:
    """Run a prompt through the model and commit it to the cache, a piece at a time.

    Yields before each piece and after the last, so that the caller can stop, show progress, or let
    other answers go first.
    """
    first = 0
    until_place = -1 if place is None else place.offset - cache.offset
    if place is not None and until_place == 0:
        place.keep()
    while first < len(tokens):
        yield
        size = step_size() if callable(step_size) else step_size
        if first < until_place:
            size = min(size, until_place - first)
        found = append_piece(model, tokens[first : first + size], cache, taps)
        if on_taps is not None:
            on_taps(first, found)
        mx.clear_cache()
        first += size
        if place is not None and first == until_place:
            place.keep()
    if tokens:
        yield


def append_piece(
    model: StreamFusedModel, tokens: list[int], cache: TextCache, taps: tuple[int, ...]
) -> Taps:
    """Commit a piece of R tokens; returns the input of each layer in `taps`, [1, R, D], lazy."""
    # The taps alone: keeping the logits would keep their inputs in memory.
    found = model.backbone.append(mx.array(tokens), cache, taps).taps
    mx.eval(cache.state)
    return found


def plain_decode(
    model: StreamFusedModel,
    prompt: list[int],  # one token or more, which follow those in `cache`
    cache: TextCache,  # drops uncounted paths; at each yield it holds every token so far
    *,
    context: Sequence[int] = (),  # the tokens that `cache` holds, for samplers that read the text
    sampler: Sampling = GREEDY,
    prefill_step_size: StepSize = PREFILL_STEP_SIZE,
    take: Take = take_all,
    place: PromptPlace | None = None,
) -> Steps:
    """Decode without drafting, endlessly: the oracle and the baseline of `speculative_decode`.

    As in mlx-lm, the next call is under way while a token is read; the call after the last token
    that is asked for is wasted.
    """
    cache.keep_first(cache.offset)
    tail = last_tokens([*context, *prompt[:-1]], sampler.context_size)
    yield from prefill_in_pieces(model, prompt[:-1], cache, prefill_step_size, place=place)
    call = plain_call(model, mx.array(prompt[-1:], mx.int32), tail, cache, sampler)
    mx.async_eval(call.arrays_to_read())
    while True:
        upcoming = plain_call(model, call.verified.root, call.tail, cache, sampler)
        mx.async_eval(upcoming.arrays_to_read())
        tokens = call.read_tokens()
        yield Step(tuple(tokens), take(tokens), call.read_logprobs(tokens))
        clear_unused_buffers(cache, 1)
        call = upcoming


def speculative_decode(
    model: StreamFusedModel,
    prompt: list[int],  # one token or more, which follow those in `cache`
    # drops uncounted paths; at each step it holds every token so far, or all but the last
    cache: TextCache,
    *,
    drafters: Sequence[Drafter],  # each under the name in its `largest` shape
    # always the first drafter's largest tree, unless given
    controller: DraftController | None = None,
    context: Sequence[int] = (),  # the tokens that `cache` holds, or the last of them
    prune: PruneConfig = NO_PRUNING,
    sampler: Sampling = GREEDY,
    acceptance: AcceptanceConfig = EXACT,
    prefill_step_size: StepSize = PREFILL_STEP_SIZE,
    # called with the tokens of each call before they are yielded. If the answer ends with them, no
    # call is launched after them but a plain one after a plain one.
    take: Take = take_all,
    place: PromptPlace | None = None,
) -> Steps:
    """Decode with drafts, endlessly: process the prompt, then verify a draft tree in each call.

    While a call runs, the next tree is drafted and its verification is built. Tokens are read when
    a tree is verified; while the drafting still runs, the next call is launched after it, and only
    then are the tokens yielded. So a GPU always has work, and the cache is written in place: MLX
    would copy it for a call that is launched while another may still read it. Drafters that need
    host tokens, and pruning by threshold, have to wait for the tokens first. So does the prompt's
    call: its token is the one that the reader waits for, and is yielded before drafting starts.

    Yields None while the prompt is processed and while a drafter starts, never between reading a
    call and yielding its step: if the loop is closed then, nothing is lost.
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
        take=take,
    )
    cache.keep_first(cache.offset)
    yield from loop.process_prompt(prompt, prefill_step_size, place)
    yield from loop.run_calls(prompt[-1])


@dataclass(frozen=True)
class _RunningCall:
    """A target call that was launched and not read yet."""

    call: TargetCall
    pending: PendingCall
    shape: DraftShape | None = None  # of the tree that it verifies; None for a bare root
    drafting: Sequence[mx.array] = ()  # that tree, if the device drafts it
    is_prompts: bool = False  # whether it is the first one, after the prompt


class _SpeculativeLoop:
    """The state of one answer between its calls; see `speculative_decode`."""

    def __init__(
        self,
        model: StreamFusedModel,
        cache: TextCache,
        tokens: list[int],  # the whole text, those that the cache holds among them
        drafters: Mapping[str, Drafter],  # by name
        controller: DraftController,
        *,
        prune: PruneConfig,
        sampler: Sampling,
        acceptance: AcceptanceConfig,
        take: Take,
    ) -> None:
        self.model = model
        self.cache = cache
        self.text = DraftingText(model, drafters, tokens)
        self.controller = controller
        self.prune = prune
        self.sampler = sampler
        self.acceptance = acceptance
        self.take = take
        self.watch = Stopwatch()

    def process_prompt(
        self, prompt: list[int], step_size: StepSize, place: PromptPlace | None
    ) -> Iterator[None]:
        """Commit the prompt but its last token; start drafters that see it, or draft first."""
        known = self.cache.offset
        taps = self.text.taps

        def follow(first: int, found: Taps) -> None:
            self.text.follow_prompt(known + first, found)

        if taps:
            yield from self.text.start_with_taps(known)
        yield from prefill_in_pieces(
            self.model,
            prompt[:-1],
            self.cache,
            step_size,
            taps=taps,
            on_taps=follow if taps else None,
            place=place,
        )
        drafts = self.controller.next()
        if drafts is not None and self.text.needs_host_tokens(drafts):
            yield from self.text.catch_up(drafts.drafter)

    def run_calls(
        self,
        root: int,  # the prompt's last token
    ) -> Steps:
        """Run target calls, endlessly.

        Mode                When                                    Order
        launch_plain_ahead  nothing is drafted, the call is plain   launch, read, yield
        read_first          nothing is drafted after a tree, or     read, propose, launch, yield
                            the drafter needs host tokens
        build_ahead         the device drafts                       propose, read, launch, yield
        draft_ahead         the same, if the next call cannot be    propose, read, launch, yield
                            built before the read

        The last two differ in when the next call is built: before or after the read. After the
        prompt's call, after the last, and before a drafter starts, `advance` yields first.
        """
        tail = last_tokens(self.text.tokens[:-1], self.sampler.context_size)
        first = self.build(root_tree(mx.array([root], mx.int32)), tail)
        running = _RunningCall(first, self.launch(first), is_prompts=True)
        yield from self.text.start_followers()
        while True:
            # `running` is under way; all before it are read. "Ahead" is before it is read.
            num_tokens = len(self.text.tokens)
            drafts = self.controller.next()
            if drafts is None and running.call.is_plain:
                running = yield from self.launch_plain_ahead(running)
            elif drafts is None or self.text.needs_host_tokens(drafts):
                running = yield from self.read_first(running)
            elif self.may_build_ahead(running):
                running = yield from self.build_ahead(running, drafts)
            else:
                running = yield from self.draft_ahead(running, drafts)
            if metal.time_pending_shape():
                self.watch.note_other_work()
            clear_unused_buffers(self.cache, len(self.text.tokens) - num_tokens)

    def may_build_ahead(self, running: _RunningCall) -> bool:
        """Whether the next call may be built before `running` is read."""
        # The prompt's token is yielded first; a threshold waits for the device; some caches have to
        # know how many tokens were accepted.
        must_read_first = running.is_prompts or self.prune.kind == "threshold"
        return self.cache.can_build_ahead and not must_read_first

    def launch_plain_ahead(self, running: _RunningCall) -> Generator[Step, None, _RunningCall]:
        """Launch a plain call after a plain call, then read that one and yield its step."""
        call = running.call
        upcoming = self.build(root_tree(call.verified.root), call.tail)
        following = _RunningCall(upcoming, self.launch(upcoming))
        step, seconds = self.read(running)
        self.report(running, step, seconds, drafts=None)
        yield from self.watch.yield_untimed(step)
        return following

    def read_first(self, running: _RunningCall) -> Generator[Step | None, None, _RunningCall]:
        """Read a call, then draft, build and launch the next one by what its tokens say."""
        step, seconds = self.read(running)
        # Asked again: drafters that had to wait for the tokens know more now.
        drafts = self.controller.next(is_read=True)
        self.report(running, step, seconds, drafts)
        return (yield from self.advance(running, step, drafts))

    def draft_ahead(
        self, running: _RunningCall, drafts: DraftShape
    ) -> Generator[Step | None, None, _RunningCall]:
        """Draft while a call is under way and read it; then build and launch the next one."""
        yield from self.text.catch_up(drafts.drafter)
        tree = self.text.propose(running.call, drafts)
        step = self.read_drafted(running, drafts)
        return (yield from self.advance(running, step, drafts, tree))

    def build_ahead(
        self, running: _RunningCall, drafts: DraftShape
    ) -> Generator[Step | None, None, _RunningCall]:
        """Draft and build the next call while a call is under way; read that one and launch."""
        call = running.call
        yield from self.text.catch_up(drafts.drafter)
        tree = self.text.propose(call, drafts)
        # MLX writes in place only into buffers with one holder, so this is dropped before the
        # launch.
        before = self.cache.snapshot()
        upcoming = self.build(tree, call.tail)
        mx.eval(running.drafting)  # mostly done; otherwise what the tree is drafted with is copied
        mx.async_eval(tree.arrays)
        step = self.read_drafted(running, drafts)
        if step.part.is_last:
            # The built call is dropped; should the answer be asked to go on, it is built anew.
            self.cache.restore(before)
            del before, upcoming
            return (yield from self.advance(running, step, drafts, tree))
        del before
        if call.is_plain:
            mx.eval(tree.arrays)  # the first drafting may have read all that the cache holds
        pending = self.launch(upcoming, follows_unread_drafting=call.is_plain)
        self.commit(call, step)
        yield from self.watch.yield_untimed(step)
        return _RunningCall(upcoming, pending, _shape_unless_bare(tree, drafts), tree.arrays)

    def advance(
        self,
        running: _RunningCall,
        step: Step,
        drafts: DraftShape | None,
        tree: Tree | None = None,  # None if it is yet to be drafted
    ) -> Generator[Step | None, None, _RunningCall]:
        """Yield what a read call brought, and build and launch the next one."""
        # The first token is waited for, and nothing may follow the last.
        yields_first = step.part.is_last or running.is_prompts
        if drafts is not None and not self.text.has_started(drafts.drafter):
            yields_first = True  # that may take as long as many calls
        self.commit(running.call, step)
        if yields_first:
            yield from self.watch.yield_untimed(step)
        if tree is None:
            tree = yield from self.draft(running.call, len(step.tokens), drafts)
        following = self.launch_tree(running, tree, drafts)
        if not yields_first:
            yield from self.watch.yield_untimed(step)
        return following

    def draft(
        self,
        call: TargetCall,
        num_tokens: int,  # that the call advanced by
        drafts: DraftShape | None,
    ) -> Generator[None, None, Tree]:
        """Draft after a call that was read; a bare root if nothing is to be drafted."""
        if drafts is None:
            return root_tree(call.verified.root)
        # Drafters on the device learn the call's tokens from `propose`, so `catch_up` must not show
        # them.
        unseen = 0 if self.text.needs_host_tokens(drafts) else num_tokens
        yield from self.watch.exclude_time(self.text.catch_up(drafts.drafter, unseen))
        tree = self.text.propose(call, drafts)
        self.text.mark_seen(drafts.drafter)
        return tree

    def build(
        self,
        tree: Tree,
        tail: mx.array,  # [C] the last tokens before the root
    ) -> TargetCall:
        """Build the call that verifies `tree`; a plain call for a bare root, if possible."""
        streams = self.text.num_streams
        # A plain call appends to the committed tokens, so it cannot follow a path that is unread.
        cache = self.cache
        if tree.num_nodes == 1 and not streams and not cache.has_uncounted_paths:
            return plain_call(self.model, tree.tokens, tail, cache, self.sampler, self.text.taps)
        return verify(
            self.model,
            tree,
            cache,
            streams_per_node=streams,
            prune=self.prune,
            sampler=self.sampler,
            acceptance=self.acceptance,
            tail=tail,
            taps=self.text.taps,
        )

    def launch(self, call: TargetCall, *, follows_unread_drafting: bool = False) -> PendingCall:
        """Start computing what `call` decides, and the cache unless it is a plain call."""
        state = [] if call.is_plain else [self.cache.state]
        return self.watch.launch(
            call.arrays_to_read(), *state, follows_unread_drafting=follows_unread_drafting
        )

    def read(self, running: _RunningCall) -> tuple[Step, float | None]:
        """Wait for a call, give its tokens to the text and the answer; its seconds, if known."""
        call = running.call
        tokens, seconds = self.watch.read(running.pending, call.read_tokens)
        self.text.extend(tokens, call.verified.accepted_taps())
        draft = None
        if running.shape is not None:
            drafter = running.shape.drafter
            draft = DraftResult(drafter, call.num_nodes, call.num_drafted, len(tokens) - 1)
        logprobs = call.read_logprobs(tokens)
        return Step(tuple(tokens), self.take(tokens), logprobs, draft), seconds

    def read_drafted(self, running: _RunningCall, drafts: DraftShape) -> Step:
        """Read and report a call after which a tree was drafted, and drop its hidden states."""
        step, seconds = self.read(running)
        self.text.mark_seen(drafts.drafter)
        running.call.release()
        self.report(running, step, seconds, drafts)
        return step

    def report(
        self,
        running: _RunningCall,
        step: Step,
        seconds: float | None,
        drafts: DraftShape | None,  # what is drafted after it
    ) -> None:
        context = len(self.text.tokens) - len(step.tokens) - 1
        # The prompt's call is not timed: drafters start while it runs, and no call is built before
        # it is read, so it takes longer than any other.
        timed = None if running.is_prompts else seconds
        self.controller.record(CallRecord(running.shape, len(step.tokens), context, timed, drafts))

    def commit(self, call: TargetCall, step: Step) -> None:
        # A plain call's row is committed already.
        if not call.is_plain:
            self.cache.commit_accepted(len(step.tokens))

    def launch_tree(
        self, running: _RunningCall, tree: Tree, drafts: DraftShape | None
    ) -> _RunningCall:
        """Build and launch the call that verifies `tree`, after a call whose rows are committed."""
        call = running.call
        drafting: Sequence[mx.array] = ()
        if drafts is not None and not self.text.needs_host_tokens(drafts):
            drafting = tree.arrays
            mx.async_eval(drafting)
        upcoming = self.build(tree, call.tail)
        mx.eval(drafting)
        follows_unread_drafting = bool(drafting) and call.is_plain
        pending = self.launch(upcoming, follows_unread_drafting=follows_unread_drafting)
        return _RunningCall(upcoming, pending, _shape_unless_bare(tree, drafts), drafting)


def _shape_unless_bare(tree: Tree, drafts: DraftShape | None) -> DraftShape | None:
    # A drafter that had no draft gave a bare root.
    return drafts if tree.num_nodes > 1 else None
