"""The drafters of one answer: what each has seen of the text, and the trees that they propose."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from ..model.streams import StreamFusedModel
from ..model.tree import Tree
from .call import TargetCall
from .controller import DraftShape
from .drafter import Drafter, Taps


def scratch_rows(drafters: Iterable[Drafter]) -> int:
    """Rows that a cache needs before the committed ones for the largest call of these drafters.

    A call that is built ahead also has the path of the one before it.
    """
    return max((_scratch_rows_of(drafter) for drafter in drafters), default=0)


def _scratch_rows_of(drafter: Drafter) -> int:
    path = 0 if drafter.needs.host_tokens else drafter.largest.levels + 1
    return drafter.largest.nodes * (1 + drafter.needs.streams) + path


@dataclass
class DraftingText:
    """The drafters of an answer, and how much of the text each of them has seen."""

    model: StreamFusedModel
    drafters: Mapping[str, Drafter]
    tokens: list[int]  # of the text, up to the last call that was read; unknown ones PAD_TOKEN
    _seen: dict[str, int] = field(default_factory=dict)  # tokens, by the drafters that have started

    @property
    def taps(self) -> tuple[int, ...]:
        """Layers whose input some drafter needs."""
        return tuple(sorted({layer for one in self.drafters.values() for layer in one.needs.taps}))

    @property
    def num_streams(self) -> int:
        """G, streams that run beside every node, for drafters that need them there."""
        return max((one.needs.streams for one in self.drafters.values()), default=0)

    def extend(self, tokens: list[int]) -> None:
        """The text has gone on; drafters that need host tokens follow at once."""
        self.tokens.extend(tokens)
        for name, drafter in self.drafters.items():
            if drafter.needs.host_tokens and name in self._seen:
                self._follow(name, len(self.tokens))

    def catch_up(self, name: str, unseen: int = 0) -> Iterator[list[int]]:
        """Have a drafter know the text, but for `unseen` tokens at its end.

        It starts when it is first asked for.
        """
        known = len(self.tokens) - unseen
        if name in self._seen:
            self._follow(name, known)
            return
        self._seen[name] = known
        yield from self.drafters[name].start(self.tokens[:known]) or ()

    def start_readers(self) -> Iterator[list[int]]:
        """Start the drafters that follow the text from the start."""
        for name, drafter in self.drafters.items():
            if drafter.needs.text and name not in self._seen:
                yield from self.catch_up(name)

    def needs_host_tokens(self, shape: DraftShape) -> bool:
        """Whether a call has to be read before `shape` is drafted behind it."""
        return self.drafters[shape.drafter].needs.host_tokens

    def start_tapped(self, known: int) -> Iterator[list[int]]:
        """Start the drafters that need taps, which see the prompt as it is processed.

        The first `known` tokens of the text, and the one behind them, have no taps.
        """
        for name, drafter in self.drafters.items():
            if drafter.needs.taps:
                self._seen[name] = known + 1
                yield from drafter.start(self.tokens[: known + 1]) or ()

    def follow_taps(self, first: int, taps: Taps) -> None:
        """Rows of the prompt from token `first` on were processed: their taps, for what follows."""
        rows = next(iter(taps.values())).shape[1]
        for name, drafter in self.drafters.items():
            if drafter.needs.taps:
                own = {layer: taps[layer] for layer in drafter.needs.taps}
                drafter.follow(self.tokens[first + 1 : first + 1 + rows], first + 1, own)
                self._seen[name] = first + 1 + rows

    def propose(self, call: TargetCall, shape: DraftShape) -> Tree:
        """The tree of `shape` behind a call; on ranks that share the model, that of rank 0."""
        tree = self.drafters[shape.drafter].propose(call.verified, shape)
        backbone = self.model.backbone
        if backbone.group is None:
            return tree
        tokens, depths, paths = backbone.broadcast_from_rank0(tree.tokens, tree.depths, tree.paths)
        return replace(tree, tokens=tokens, depths=depths, paths=paths)

    def note_seen(self, name: str) -> None:
        """A drafter saw the tokens of the call that it drafted behind."""
        self._seen[name] = len(self.tokens)

    def _follow(self, name: str, known: int) -> None:
        missed = self.tokens[self._seen[name] : known]
        if missed:
            self.drafters[name].follow(missed, self._seen[name])
        self._seen[name] = known
