"""Lookup: what followed the text's last tokens where they stood before is likely to follow.

Drafts from nothing else, and looks up on the host; what streams copy is looked up on the device,
see `copies`.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence

from ..decoding.controller import DraftShape
from ..decoding.drafter import Needs, Taps, Verified
from ..model.tree import Tree
from ..settings import PromptLookupConfig
from .registry import DrafterInputs, register_drafter
from .trie import Trie, padded_size

MAX_MATCHES = 8  # places that are remembered of each n-gram, the newest ones


class PromptLookupDrafter:
    """Drafts what followed the text's last n tokens where they stood earlier.

    The longest n first, and for each the newest place first; every match's continuation is a
    chain, and chains with a common beginning share its nodes. A continuation that reaches the
    end of the text goes on in itself, so a text with a period is drafted at full length.

    With a reference, continuations are its own alone, and it follows the prompt as the answer does.
    """

    name = "prompt-lookup"
    needs = Needs(host_tokens=True)
    num_parameters = 0
    draft_calls = 0
    cache_bytes = 0

    def __init__(self, config: PromptLookupConfig) -> None:
        nodes = padded_size(config.size)
        self.largest = DraftShape(self.name, nodes, config.num_draft_tokens)
        self._config = config
        self.start(())

    def start(self, tokens: Sequence[int]) -> None:
        """See `Drafter.start`."""
        self._text: list[int] = []
        self._ends: dict[tuple[int, ...], deque[int]] = defaultdict(
            lambda: deque(maxlen=MAX_MATCHES + 1)
        )
        self._source = 0  # tokens that are looked up in; 0 for the text itself
        if reference := self._config.reference:
            self._extend([*tokens[-self._config.ngram :], *reference])
            self._source = len(self._text)
        self._extend(tokens)

    def follow(self, tokens: Sequence[int], position: int, taps: Taps | None = None) -> None:
        """See `Drafter.follow`."""
        self._extend(tokens)

    def propose(self, verified: Verified, shape: DraftShape) -> Tree:
        """See `Drafter.propose`."""
        text = self._text
        levels = shape.levels
        trie = Trie(text[-1], self._config.size)
        for end in self._matches():
            period = len(text) - end
            following = text[end : min(end + levels, self._source or len(text))]
            count = len(following) if self._source else levels
            trie.add([following[index % period] for index in range(count)])
            if trie.is_full:
                break
        tree, _ = trie.tree(levels if len(trie.tokens) > 1 else 0)
        return tree

    def _extend(self, tokens: Iterable[int]) -> None:
        text = self._text
        for token in tokens:
            text.append(token)
            if self._source:
                continue
            for n in range(1, min(self._config.ngram, len(text)) + 1):
                self._ends[tuple(text[-n:])].append(len(text))

    def _matches(self) -> Iterator[int]:
        """Where the text's last tokens ended before: the likeliest places first."""
        text = self._text
        for n in range(min(self._config.ngram, len(text)), 0, -1):
            ends = self._ends[tuple(text[-n:])]
            yield from (end for end in reversed(ends) if end < len(text))


@register_drafter(
    "prompt-lookup",
    settings=PromptLookupConfig,
    config_field="prompt_lookup",
    reads_text=True,
)
def build(inputs: DrafterInputs) -> PromptLookupDrafter:
    return PromptLookupDrafter(inputs.settings)
