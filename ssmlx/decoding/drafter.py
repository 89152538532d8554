"""The interface between the decoding loop and the drafters, which are in `ssmlx/drafters/`."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import mlx.core as mx

from ..model.text_cache import TextCache
from ..model.tree import Tree
from .accept import Acceptance
from .draft_shape import DraftShape

Taps = Mapping[int, mx.array]
"""Hidden states by layer: [1, R, D] as they enter layer n, R rows.

Of a model of N layers number N is what enters the final norm: the last layer's output."""


@dataclass(frozen=True)
class Needs:
    """A drafter's needs of the target's calls beside the last hidden states."""

    streams: int = 0
    """G, speculative streams that each node of a verified tree carries (the paper's schedule)."""
    taps: tuple[int, ...] = ()
    """Layers whose input it reads: of the prompt, and of the nodes of every tree. The number of
    layers means the final norm."""
    host_tokens: bool = False
    """Whether `propose` reads values of tokens, such as to look them up. Then each call is read
    before it drafts; otherwise the next tree is drafted while the call runs."""
    follows_from_start: bool = False
    """Whether it is started before the prompt's call is read, and follows every token from then on,
    because what it offers (`OfferSource`) depends on the text. Otherwise it is started when the
    controller first lets it draft."""


@dataclass(frozen=True, eq=False)
class Verified:
    """The states that a target call on M nodes leaves for drafting; arrays on the device."""

    tree: Tree  # the M nodes that were verified
    # [M] the target's token after each, see `Sampling.sample`
    target_tokens: mx.array
    acceptance: Acceptance  # how far the tree held
    # [1, M, D] last hidden states of the nodes, before the final norm; None for a model without
    # stages, where a drafter taps the final norm instead
    node_hidden: mx.array | None
    # [1, G, D] those of the last accepted node's streams; None if the call carried no streams
    stream_hidden: mx.array | None
    # [1, M, D] hidden states of the nodes before the insertion layer; None for a model without
    # streams
    insertion_hidden: mx.array | None
    position: mx.array  # [1] the root's position in the text
    cache: TextCache  # holds the accepted path: as its newest path, or committed already
    # [1, M, D] by layer: the inputs of the layers that a drafter taps
    taps: Taps = field(default_factory=dict)

    @property
    def root(self) -> mx.array:
        """[1] the newest token, which the next tree starts from."""
        return self.acceptance.correction

    @property
    def root_position(self) -> mx.array:
        """[1] the position of `root` in the text."""
        return self.position + self.acceptance.num_accepted + 1

    @property
    def last_hidden(self) -> mx.array:
        """[1, 1, D] last hidden state of the last accepted node, which predicted `root`."""
        if self.node_hidden is None:
            raise ValueError("a model without stages gives last hidden states only as a tap")
        return self.node_hidden[:, self.acceptance.last]

    def accepted_taps(self) -> Taps:
        """[1, P, D] by layer: the taps of the accepted path; rows after it repeat the last."""
        return {layer: rows[:, self.acceptance.path] for layer, rows in self.taps.items()}


class Drafter(Protocol):
    """Proposes the tree that the next call verifies.

    Siblings carry different tokens; a node of token `tree.PAD_TOKEN` fills a tree up to a usual
    size and is never accepted. Under exact acceptance, the answer is the target's own, whatever is
    proposed.

    A drafter may also have an `offer()`, which says at each call what it could draft now
    (`ssmlx.policy.offers.OfferSource`); one without is taken to bring as much at every call.

    Attributes:
        largest: the largest tree that it proposes, padding included.
        needs: what it needs of the target's calls.
        num_parameters: parameters that it needs beside the target's and LoRA's.
        draft_model_calls: forward passes of a model other than the target, since it was made.
        cache_bytes: bytes that it keeps of the text itself, beside those of a draft model.
    """

    @property
    def largest(self) -> DraftShape: ...

    @property
    def needs(self) -> Needs: ...

    @property
    def num_parameters(self) -> int: ...

    @property
    def draft_model_calls(self) -> int: ...

    @property
    def cache_bytes(self) -> int: ...

    def start(self, tokens: Sequence[int]) -> Iterator[None] | None:
        """Begin after a text, and forget any other.

        A loop calls it once: before the prompt is processed if the drafter needs taps, after it if
        it follows the text (`needs.follows_from_start`), else when it is first to draft. An answer
        that comes back from a batch has a new loop.

        Args:
            tokens: the text so far; unknown tokens are `PAD_TOKEN`.

        Returns:
            None; or, if that takes calls of a model, an iterator that yields None before each of
            them, so that other answers can go first. The loop runs it to its end.
        """

    def follow(self, tokens: Sequence[int], position: int, taps: Taps | None = None) -> None:
        """Take in tokens that the text went on by.

        A drafter that needs host tokens and has started follows every call at once, with the taps
        that it needs. Others follow when they next draft, without taps; the tokens of calls that
        they drafted after were shown by `propose`. A drafter that needs taps also follows each
        piece of the prompt.

        Args:
            tokens: ids; unknown ones are `PAD_TOKEN`.
            position: the first one's position in the text.
            taps: for each token, what entered the tapped layers at the position before it, [1, R,
                D]; None if the calls did not keep them.
        """

    def propose(self, verified: Verified, shape: DraftShape) -> Tree:
        """Draft a tree for the next call.

        Reading values of `verified` waits for the target: only drafters that need host tokens do
        so, and the loop has read them by then.

        Args:
            verified: the call to draft after.
            shape: how large a tree; fewer nodes are fine.

        Returns:
            A tree whose root is `verified.root`; a bare root if there is nothing to draft. A
            drafter that needs host tokens knows it: the last token that `start` or `follow` gave.
        """
