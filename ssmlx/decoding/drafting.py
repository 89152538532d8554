"""The drafters of one answer: what each has seen of the text, and the trees that they propose."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from ..model.streams import StreamFusedModel
from ..model.tree import Tree
from .call import TargetCall
from .draft_shape import DraftShape
from .drafter import Drafter, Taps


def scratch_rows(drafters: Iterable[Drafter]) -> int:
    """Rows that a cache must keep before the committed ones, for the neediest of `drafters`."""
    most = 0
    for drafter in drafters:
        # The path of the call before is not committed yet, unless that call is read first.
        path = 0 if drafter.needs.host_tokens else drafter.largest.levels + 1
        most = max(most, drafter.largest.nodes * (1 + drafter.needs.streams) + path)
    return most


@dataclass
class DraftingText:
    """The drafters of an answer, its text, and how much of it each of them has seen."""

    model: StreamFusedModel
    drafters: Mapping[str, Drafter]
    tokens: list[int]  # of the text, up to the last call that was read; unknown ones are PAD_TOKEN
    # tokens shown to each drafter that has started
    _seen: dict[str, int] = field(default_factory=dict)

    @property
    def taps(self) -> tuple[int, ...]:
        """Layers whose input some drafter needs, ascending."""
        return tuple(sorted({layer for one in self.drafters.values() for layer in one.needs.taps}))

    @property
    def num_streams(self) -> int:
        """G, the most streams beside every node that some drafter needs in the verifying pass."""
        return max((one.needs.streams for one in self.drafters.values()), default=0)

    def extend(
        self,
        tokens: list[int],
        taps: Taps | None = None,  # [1, R, D] by layer: R >= len(tokens) nodes before these tokens
    ) -> None:
        """Append tokens that were read; started drafters that need host tokens follow at once."""
        first = len(self.tokens)
        self.tokens.extend(tokens)
        for name, drafter in self.drafters.items():
            if drafter.needs.host_tokens and name in self._seen:
                own = None
                if taps and drafter.needs.taps and self._seen[name] == first:
                    own = {layer: taps[layer][:, : len(tokens)] for layer in drafter.needs.taps}
                self._follow_up_to(name, len(self.tokens), own)

    def catch_up(
        self,
        name: str,
        num_held_back: int = 0,  # of the text's last tokens, not shown
    ) -> Iterator[None]:
        """Show a drafter what it has not seen; yields before each call that its `start` makes."""
        known = len(self.tokens) - num_held_back
        if name in self._seen:
            self._follow_up_to(name, known)
            return
        self._seen[name] = known
        yield from self.drafters[name].start(self.tokens[:known]) or ()

    def has_started(self, name: str) -> bool:
        return name in self._seen

    def start_followers(self) -> Iterator[None]:
        """Start the drafters that follow the text from its start; yields as their `start` does."""
        for name, drafter in self.drafters.items():
            if drafter.needs.follows_from_start and name not in self._seen:
                yield from self.catch_up(name)

    def needs_host_tokens(self, shape: DraftShape) -> bool:
        """Whether a call has to be read before `shape` is drafted after it."""
        return self.drafters[shape.drafter].needs.host_tokens

    def start_with_taps(self, num_cached: int) -> Iterator[None]:
        """Start the drafters that need taps, before the prompt is processed."""
        # Cached tokens, and the one after them, have no taps.
        for name, drafter in self.drafters.items():
            if drafter.needs.taps:
                self._seen[name] = num_cached + 1
                yield from drafter.start(self.tokens[: num_cached + 1]) or ()

    def follow_prompt(
        self,
        first_position: int,
        taps: Taps,  # [1, R, D] by layer: its input at the piece's R rows
    ) -> None:
        """Show a processed piece to the drafters that need taps."""
        # Each token goes with the taps of the row before it: so from the piece's second token on.
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

    def propose(
        self,
        call: TargetCall,  # whose states are not released yet
        shape: DraftShape,
    ) -> Tree:
        """The tree that the next call verifies; on every rank, rank 0's."""
        tree = self.drafters[shape.drafter].propose(call.verified, shape)
        backbone = self.model.backbone
        if backbone.group is None:
            return tree
        tokens, depths, paths = backbone.broadcast_from_rank0(tree.tokens, tree.depths, tree.paths)
        return replace(tree, tokens=tokens, depths=depths, paths=paths)

    def mark_seen(self, name: str) -> None:
        """Note that `propose` showed a drafter the last call's tokens."""
        self._seen[name] = len(self.tokens)

    def _follow_up_to(self, name: str, num_tokens: int, taps: Taps | None = None) -> None:
        missed = self.tokens[self._seen[name] : num_tokens]
        if missed:
            self.drafters[name].follow(missed, self._seen[name], taps)
        self._seen[name] = num_tokens
