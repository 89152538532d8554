"""The host's side of an exported model: which slot of the cache holds which token, and the loop.

The twin of `ssmlx/decoding/loop.py`: there the device holds everything, here the host keeps tree
and slot map in numpy, and the model is two functions of fixed shapes.

A slot is a row of every layer's keys and values. A step writes each node of its tree into a free
slot; accepting a node makes its slot a committed one, and the others are free again, still full of
values that no row will see. So nothing in the cache is ever moved, and rejecting costs nothing.
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

# What is added to the score of a slot that a row does not see. Not minus infinity: on the Neural
# Engine and in float16 it turns into NaN if a row sees nothing, and exp(-1e4) is 0 everywhere.
MASKED = -1e4


class SlotCache:
    """The cache of one sequence: the runtime's state, and which slots hold committed tokens."""

    def __init__(self, state: Any, num_slots: int) -> None:
        self.state = state  # keys and values, as the backend has them
        self.offset = 0  # committed tokens
        self.text = list[int]()  # their ids, in order
        self._used = np.zeros(num_slots, bool)

    def find_free_slots(self, count: int) -> np.ndarray:  # [count], ascending
        """Numbers of free slots, which stay free until `commit`."""
        found = np.flatnonzero(~self._used)[:count].astype(np.int32)
        require(
            len(found) == count,
            f"the context of {len(self._used)} tokens holds {self.offset}",
            expected=f"room for {count} more",
            do="shorten the prompt, or export with a larger --context",
        )
        return found

    def commit(
        self,
        slots: np.ndarray,  # [n] of each token its slot, which is free
        tokens: list[int],  # [n], which follow the text
    ) -> None:
        self.offset += len(slots)
        self.text += tokens
        self._used[slots] = True

    def build_mask(
        self,
        slots: np.ndarray,  # [R] that the rows are written to
        visible: np.ndarray,  # [R, R] which row sees which; each sees all committed slots too
    ) -> np.ndarray:  # [1, 1, R, S] float32
        """Additive: 0 if a row sees a slot, else `MASKED`."""
        mask = np.where(self._used, 0, MASKED).astype(np.float32)
        mask = np.repeat(mask[None], len(slots), axis=0)
        mask[:, slots] = np.where(visible, 0, MASKED)
        return mask[None, None]


def prefill(
    backend: Backend,
    manifest: Manifest,
    tokens: list[int],  # that follow what the cache holds; may be empty
    cache: SlotCache,
) -> None:
    """Process tokens, a chunk a call. The last one is filled up with rows whose slots stay free."""
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
    tree: Tree,  # of at most N nodes
    slots: np.ndarray,  # [N] free ones
    cache: SlotCache,
    manifest: Manifest,
) -> dict[str, np.ndarray]:
    """The inputs by name, filled up to N rows. Nodes that the tree lacks have token 0 and depth -1,
    are their own parents, and see only committed tokens and themselves."""
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
    """Positions up to the last slot; rows that only fill up may lie beyond it."""
    clipped: np.ndarray = np.minimum(positions, manifest.num_slots - 1).astype(np.int32)
    return clipped


def decode_step(
    backend: Backend,
    manifest: Manifest,
    tree: Tree,  # its root is the newest token, which is not in the cache yet
    cache: SlotCache,
    copies: Copies,  # of the text; mixed into the guesses only if streams have a condition
    take: Take = take_all,  # called when the cache holds the tokens, except for the last
) -> tuple[Step, Tree]:
    """Make a target call: verify a draft tree, commit the accepted path, draft the next tree."""
    verified = tree
    slots = cache.find_free_slots(manifest.num_nodes)
    found = backend.predict(DECODE, build_decode_inputs(tree, slots, cache, manifest), cache.state)
    kept = np.arange(tree.num_nodes)
    if "kept" in found:
        # Rows that fill up may be kept if the tree is small; they come after its nodes.
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
        guesses = copies.learn_and_mix(guesses, mx.array(tokens), count, cache.offset - count)
    following = grow_tree(mx.array(tokens[-1:]), *guesses, manifest.tree.config)
    draft = None
    if verified.num_nodes > 1:
        draft = DraftResult("streams", verified.num_nodes, verified.num_drafted, len(tokens) - 1)
    return Step(tuple(tokens), take(tokens), draft=draft), following


def speculative_decode(
    backend: Backend,
    manifest: Manifest,
    prompt: list[int],  # at least one token; follows what the cache holds
    cache: SlotCache,
    take: Take = take_all,  # called once with the tokens of each call, before they are yielded
) -> Iterator[Step]:
    """Yield a step for each target call, until the cache has no room for another; nothing else ends
    it."""
    prefill(backend, manifest, prompt[:-1], cache)
    tree = root_tree(mx.array(prompt[-1:]))
    copies = Copies([*cache.text, *prompt[-1:]])
    while cache.offset + manifest.num_nodes <= manifest.num_slots:
        # The tree is small: what is done with it stays on the CPU, away from the exported model.
        with mx.stream(mx.cpu):
            step, tree = decode_step(backend, manifest, tree, cache, copies, take)
        yield step
