"""The host's side of an exported model: which slot of the cache holds which token, and the loop.

The twin of `ssmlx/decoding/loop.py`: there the device holds everything, here the host keeps tree
and slot map in numpy, and the model is two functions of fixed shapes.

A slot is a place in every layer's keys and values. A step writes each node of its tree into a
free slot; accepting a node makes its slot a committed one, and the others are free again, still
full of what nobody will see. So nothing in the cache is ever moved, and rejecting costs nothing.
"""

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np

from ..decoding.accept import accept
from ..decoding.step import DraftResult, Step, Take, take_all
from ..drafters.copies import Copies
from ..errors import require
from ..model.tree import Tree, grow_tree, root_tree
from .backends import DECODE, PREFILL, Backend
from .manifest import Manifest

MASKED = -1e4
"""What is added to the score of a slot that a row does not see. Not minus infinity: on the Neural
Engine and in float16 it turns into NaN where a row sees nothing, and exp(-1e4) is 0 everywhere."""


class SlotCache:
    """The cache of one sequence: the runtime's state, and which slots hold committed tokens.

    Attributes:
        state: keys and values, as the backend has them.
        offset: how many tokens are committed.
        text: the ids of these tokens, in order.
    """

    def __init__(self, state: Any, num_slots: int) -> None:
        """Begin with no token, and `num_slots` free slots, around an empty `state` that a backend
        has made.
        """
        self.state = state
        self.offset = 0
        self.text = list[int]()
        self._used = np.zeros(num_slots, bool)

    def find_free_slots(self, count: int) -> np.ndarray:
        """Return the numbers of the first `count` free slots, [count] int32, ascending; they stay
        free until `commit`.

        Raises:
            InputError: there are not as many.
        """
        found = np.flatnonzero(~self._used)[:count].astype(np.int32)
        require(
            len(found) == count,
            f"{self.offset} tokens are in a context of {len(self._used)}",
            expected=f"room for {count} more",
            do="shorten the prompt, or export with a larger --context",
        )
        return found

    def commit(self, slots: np.ndarray, tokens: list[int]) -> None:
        """Mark slots as holding the next tokens of the text, so that all later rows see them.

        Args:
            slots: [n] of each token its slot, which is free.
            tokens: n ids.
        """
        self.offset += len(slots)
        self.text += tokens
        self._used[slots] = True

    def build_mask(self, slots: np.ndarray, visible: np.ndarray) -> np.ndarray:
        """Build the additive mask [1, 1, R, S] float32 of rows that are written to `slots`: 0 where
        a row sees a slot, else `MASKED`.

        Args:
            slots: [R] of each row its slot.
            visible: [R, R] bool, which row (first axis) sees which (second axis). Every row sees
                all committed slots besides.
        """
        mask = np.where(self._used, 0, MASKED).astype(np.float32)
        mask = np.repeat(mask[None], len(slots), axis=0)
        mask[:, slots] = np.where(visible, 0, MASKED)
        return mask[None, None]


def prefill(backend: Backend, manifest: Manifest, tokens: list[int], cache: SlotCache) -> None:
    """Process tokens into the cache, a chunk a call, and commit them.

    The last chunk is filled up with rows whose slots stay free.

    Args:
        backend: runs the model.
        manifest: describes it.
        tokens: ids that follow what the cache holds; may be empty.
        cache: of the sequence.

    Raises:
        InputError: the cache has no room for a whole chunk; those before it are committed.
    """
    size = manifest.chunk
    for first in range(0, len(tokens), size):
        chunk = tokens[first : first + size]
        slots = cache.find_free_slots(size)
        padded = np.zeros(size, np.int32)
        padded[: len(chunk)] = chunk
        inputs = {
            "tokens": padded,
            "positions": _clip_positions(cache.offset + np.arange(size), manifest),
            "slots": slots,
            "mask": cache.build_mask(slots, np.tri(size, dtype=bool)).astype(manifest.float_type),
        }
        backend.predict(PREFILL, inputs, cache.state)
        cache.commit(slots[: len(chunk)], chunk)


def build_decode_inputs(
    tree: Tree, slots: np.ndarray, cache: SlotCache, manifest: Manifest
) -> dict[str, np.ndarray]:
    """Build the inputs of the function "decode" for a tree of at most N nodes.

    Args:
        tree: the draft tree.
        slots: [N] free slots.
        cache: of the sequence.
        manifest: has N and the types.

    Returns:
        Arrays by name, filled up to N rows. Nodes that the tree lacks have token 0 and depth -1,
        are their own parents, and see committed tokens and themselves alone.
    """
    size = manifest.num_nodes
    count = tree.num_nodes
    own = np.arange(size, dtype=np.int32)
    tokens = np.zeros(size, np.int32)
    depths = np.full(size, -1, np.int32)
    parents = own.copy()
    ancestors = np.eye(size, dtype=bool)
    tokens[:count] = tree.tokens
    depths[:count] = tree.depths
    parents[:count] = tree.parents
    ancestors[:count, :count] = tree.ancestors
    return {
        "tokens": tokens,
        "positions": _clip_positions(cache.offset + np.maximum(depths, 0), manifest),
        "slots": slots,
        "mask": cache.build_mask(slots, ancestors).astype(manifest.float_type),
        "parents": parents,
        "depths": depths,
        "ancestors": ancestors.astype(manifest.float_type),
    }


def _clip_positions(positions: np.ndarray, manifest: Manifest) -> np.ndarray:
    """Return positions as int32, those beyond the last slot moved to it: rows that only fill up may
    have such.

    Args:
        positions: of any shape.
        manifest: has the number of slots.
    """
    clipped: np.ndarray = np.minimum(positions, manifest.num_slots - 1).astype(np.int32)
    return clipped


def decode_step(
    backend: Backend,
    manifest: Manifest,
    tree: Tree,
    cache: SlotCache,
    copies: Copies,
    take: Take = take_all,
) -> tuple[Step, Tree]:
    """Make one target call: verify a draft tree, commit the accepted path, and draft the next tree.

    Args:
        backend: runs the model.
        manifest: describes it.
        tree: its root is the newest token, which is not in the cache yet.
        cache: gets the root and the accepted nodes below it.
        copies: of the text's tokens; where streams have a condition, they are mixed into the
            guesses and told of the new tokens, else they are not used.
        take: called with the tokens, which the cache holds then but for the last.

    Returns:
        The step: the accepted tokens with the bonus or correction token behind them, and what came
        of `tree`; and the next draft tree, whose root is the last of its tokens.

    Raises:
        InputError: the cache has not as many free slots as a step has rows.
        RuntimeError: the graph has drafted for another node than the host has accepted.
    """
    verified = tree
    slots = cache.find_free_slots(manifest.num_nodes)
    found = backend.predict(DECODE, build_decode_inputs(tree, slots, cache, manifest), cache.state)
    kept = np.arange(tree.num_nodes)
    if "kept" in found:
        # Rows that fill up may be kept where the tree is small; they stand behind its nodes.
        kept = found["kept"][found["kept"] < tree.num_nodes]
        tree = tree.select(mx.array(kept))
    targets = found["target_tokens"][: len(kept)]
    accepted = accept(tree, mx.array(targets))
    path = np.array(accepted.path)[: int(np.array(accepted.num_accepted)[0]) + 1]
    last = int(path[-1])
    drafted = int(found["last"][0])
    if last != drafted:
        raise RuntimeError(
            f"the model drafted for node {drafted} and the host accepted node {last}: "
            "the package and this loop do not belong together"
        )
    tokens = [int(token) for token in targets[path]]
    cache.commit(slots[kept[path]], [int(tree.tokens[0]), *tokens[:-1]])
    guesses = mx.array(found["candidate_tokens"]), mx.array(found["candidate_logprobs"])
    if manifest.tree.is_conditional:
        count = mx.array([len(tokens) - 1])
        guesses = copies.learn_and_mix_into_guesses(
            guesses, mx.array(tokens), count, cache.offset - count
        )
    following = grow_tree(mx.array(tokens[-1:]), *guesses, manifest.tree.config)
    draft = None
    if verified.num_nodes > 1:
        draft = DraftResult("streams", verified.num_nodes, verified.num_drafted, len(tokens) - 1)
    return Step(tuple(tokens), take(tokens), draft=draft), following


def speculative_decode(
    backend: Backend,
    manifest: Manifest,
    prompt: list[int],
    cache: SlotCache,
    take: Take = take_all,
) -> Iterator[Step]:
    """Process a prompt, then yield a step for each target call, until the cache has no room for
    another; nothing but this ends it.

    Args:
        backend: runs the model.
        manifest: describes it.
        prompt: one token or more; follows what the cache holds.
        cache: is left holding the prompt and all that was yielded but for the last token.
        take: called once with the tokens of each call, before they are yielded.

    Raises:
        InputError: the cache has no room for the prompt's chunks.
        RuntimeError: see `decode_step`.
    """
    prefill(backend, manifest, prompt[:-1], cache)
    tree = root_tree(mx.array(prompt[-1:]))
    copies = Copies([*cache.text, *prompt[-1:]])
    while cache.offset + manifest.num_nodes <= manifest.num_slots:
        # The tree is small: what is done with it stays on the CPU, away from the exported model.
        with mx.stream(mx.cpu):
            step, tree = decode_step(backend, manifest, tree, cache, copies, take)
        yield step
