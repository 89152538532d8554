"""The drafters of one answer: what each has seen of the text, and the trees that they propose."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from ..model.streams import StreamFusedModel
from ..model.tree import Tree
from .call import TargetCall
from .draft_shape import DraftShape
from .drafter import Drafter, Taps


def scratch_rows(drafters: Iterable[Drafter]) -> int:
    """S, the rows that a cache has to keep before the committed ones, for these drafters.

    It is the most that any of them needs: for the nodes of its largest tree and their streams, and,
    unless it needs host tokens, for the path of the call before, which is not committed yet. 0
    without drafters.
    """
    return max((_scratch_rows_of(drafter) for drafter in drafters), default=0)


def _scratch_rows_of(drafter: Drafter) -> int:
    """S of one drafter: the nodes of its largest tree with their streams, and a path of the largest
    depth unless it needs host tokens.
    """
    path = 0 if drafter.needs.host_tokens else drafter.largest.levels + 1
    return drafter.largest.nodes * (1 + drafter.needs.streams) + path


@dataclass
class DraftingText:
    """The drafters of an answer, the text, and how much of it each of them has seen."""

    model: StreamFusedModel
    drafters: Mapping[str, Drafter]
    tokens: list[int]  # of the text, up to the last call that was read; unknown ones PAD_TOKEN
    _seen: dict[str, int] = field(default_factory=dict)  # tokens, by the drafters that have started

    @property
    def taps(self) -> tuple[int, ...]:
        """Numbers of the layers whose input some drafter needs, ascending."""
        return tuple(sorted({layer for one in self.drafters.values() for layer in one.needs.taps}))

    @property
    def num_streams(self) -> int:
        """G, the most streams beside every node that some drafter needs in the verifying pass."""
        return max((one.needs.streams for one in self.drafters.values()), default=0)

    def extend_and_let_host_drafters_follow(
        self, tokens: list[int], taps: Taps | None = None
    ) -> None:
        """Append tokens that were read to the text.

        Drafters that have started and need host tokens `follow` them here; others before they next
        draft, see `start_or_catch_up`.

        Args:
            tokens: that a call advanced by.
            taps: by layer, [1, R, D] of the nodes before these tokens, of which the first count;
                None or empty where no drafter needs any.
        """
        first = len(self.tokens)
        self.tokens.extend(tokens)
        for name, drafter in self.drafters.items():
            if drafter.needs.host_tokens and name in self._seen:
                own = None
                if taps and drafter.needs.taps and self._seen[name] == first:
                    own = {layer: taps[layer][:, : len(tokens)] for layer in drafter.needs.taps}
                self._follow_up_to(name, len(self.tokens), own)

    def start_or_catch_up(self, name: str, num_held_back: int = 0) -> Iterator[None]:
        """Show a drafter what it has not seen of the text; start it if it has not started.

        Nothing is done before the first value is asked for.

        Args:
            name: the drafter's.
            num_held_back: how many of the text's last tokens it is not shown.

        Yields:
            What the drafter's `start` yields: None before each call of a model.
        """
        known = len(self.tokens) - num_held_back
        if name in self._seen:
            self._follow_up_to(name, known)
            return
        self._seen[name] = known
        yield from self.drafters[name].start(self.tokens[:known]) or ()

    def has_started(self, name: str) -> bool:
        """Whether a drafter has been shown the text's beginning."""
        return name in self._seen

    def start_text_followers(self) -> Iterator[None]:
        """Start the drafters whose `needs.follows_from_start` is set, if they have not started.

        Yields:
            What their `start` yields: None before each call of a model.
        """
        for name, drafter in self.drafters.items():
            if drafter.needs.follows_from_start and name not in self._seen:
                yield from self.start_or_catch_up(name)

    def needs_host_tokens(self, shape: DraftShape) -> bool:
        """Whether a call has to be read before `shape` is drafted behind it."""
        return self.drafters[shape.drafter].needs.host_tokens

    def start_drafters_with_taps(self, num_cached: int) -> Iterator[None]:
        """Start the drafters that need taps, before the prompt is processed.

        They are given the first `num_cached` + 1 tokens of the text.

        Args:
            num_cached: tokens of the text that the cache holds; they and the one behind have no
                taps.

        Yields:
            What their `start` yields: None before each call of a model.
        """
        for name, drafter in self.drafters.items():
            if drafter.needs.taps:
                self._seen[name] = num_cached + 1
                yield from drafter.start(self.tokens[: num_cached + 1]) or ()

    def show_prompt_piece_with_taps(self, first_position: int, taps: Taps) -> None:
        """Show the drafters that need taps a piece of the prompt that was processed.

        They `follow` the R tokens from position `first_position` + 1 on, each with the taps of the
        row before it: not the piece's first token, but the one behind its last.

        Args:
            first_position: the position of the piece's first token in the text.
            taps: by layer, [1, R, D] its input at the piece's R rows.
        """
        rows = next(iter(taps.values())).shape[1]
        for name, drafter in self.drafters.items():
            if drafter.needs.taps:
                own = {layer: taps[layer] for layer in drafter.needs.taps}
                drafter.follow(
                    self.tokens[first_position + 1 : first_position + 1 + rows],
                    first_position + 1,
                    own,
                )
                self._seen[name] = first_position + 1 + rows

    def propose(self, call: TargetCall, shape: DraftShape) -> Tree:
        """Draft the tree that the next call verifies, by the drafter that `shape` names.

        Args:
            call: the call that it follows, its states not released yet.
            shape: drafter, and how large a tree.

        Returns:
            The drafter's tree, on every rank rank 0's where the model is split over ranks.
        """
        tree = self.drafters[shape.drafter].propose(call.verified, shape)
        backbone = self.model.backbone
        if backbone.group is None:
            return tree
        tokens, depths, paths = backbone.broadcast_from_rank0(tree.tokens, tree.depths, tree.paths)
        return replace(tree, tokens=tokens, depths=depths, paths=paths)

    def mark_seen(self, name: str) -> None:
        """Note that drafter `name` has seen the whole text; the drafter itself is not called.

        It drafted behind the last call, and `propose` showed it that call's tokens.
        """
        self._seen[name] = len(self.tokens)

    def _follow_up_to(self, name: str, num_tokens: int, taps: Taps | None = None) -> None:
        """Let drafter `name`, which has started, follow the text's first `num_tokens` tokens.

        Only tokens that it has not seen are shown, with the `taps` before them; none where it has
        seen so many.
        """
        missed = self.tokens[self._seen[name] : num_tokens]
        if missed:
            self.drafters[name].follow(missed, self._seen[name], taps)
        self._seen[name] = num_tokens
