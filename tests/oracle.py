"""Decoding with the reference, slow and obvious: the oracle of the MLX loops.

Nothing is cached: every step computes the whole sequence anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from convert.reference.model import ReferenceOutput


class _Predictor(Protocol):
    """What decoding asks of a model: `StreamFusedReference`, or a scripted one in tests."""

    def __call__(
        self,
        input_ids: torch.Tensor,
        *,
        positions: torch.Tensor | None = None,
        visible: torch.Tensor | None = None,
        stream_rows: torch.Tensor | None = None,
    ) -> ReferenceOutput: ...


def likeliest_tokens(output: ReferenceOutput, carrier: int, width: int) -> list[list[int]]:
    """[G][k] the tokens that each stream of the `carrier`-th row with streams finds likeliest.

    A stream cannot rank more of them than it drafts from.
    """
    logits = output.stream_logits[0, carrier]
    ranked = logits.topk(min(width, logits.shape[-1])).indices
    vocab = output.draft_vocab
    return (ranked if vocab is None else vocab[ranked]).tolist()


def tree_inputs(
    prompt: Sequence[int], tokens: Sequence[int], parents: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A prompt and the draft tree after it, as `forward` takes them (section 3.2.2, eq. 4).

    A node at depth d stands at position len(prompt) + d and sees the prompt, its ancestors and
    itself.

    Args:
        prompt: [L] committed tokens.
        tokens: [N] the tree's tokens, parents before children.
        parents: [N] each node's parent; -1 for the root, node 0.

    Returns:
        input_ids [1, L + N], positions [1, L + N], visible [1, L + N, L + N].
    """
    length, total = len(prompt), len(prompt) + len(tokens)
    positions = torch.arange(total)
    visible = torch.ones(total, total, dtype=torch.bool).tril()
    for node, parent in enumerate(parents):
        if not (-1 if node == 0 else 0) <= parent < max(node, 0):
            raise ValueError(f"node {node} has parent {parent}, expected an earlier node")
        row, above = length + node, length + parent
        visible[row, length:] = False if parent < 0 else visible[above, length:]
        visible[row, row] = True
        positions[row] = length if parent < 0 else positions[above] + 1
    return torch.tensor([[*prompt, *tokens]]), positions[None], visible[None]


def full_tree(root: int, candidates: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
    """The tree of every combination of candidates, breadth first (A.1).

    Args:
        root: the correction token.
        candidates: [G][k] the likeliest tokens of each stream; level j has those of stream j.

    Returns:
        The tokens and the parents of the 1 + k + ... + k^G nodes.
    """
    tokens, parents, level = [root], [-1], [0]
    for choices in candidates:
        start = len(tokens)
        for parent in level:
            tokens.extend(choices)
            parents.extend([parent] * len(choices))
        level = list(range(start, len(tokens)))
    return tokens, parents


def accepted_path(
    tokens: Sequence[int], parents: Sequence[int], target: Sequence[int]
) -> list[int]:
    """The nodes from the root along children that carry the target's own token.

    Args:
        tokens: [N] the tree's tokens.
        parents: [N] the tree's parents.
        target: [N] the token that the target chooses after each node.
    """
    children = {(p, t): node for node, (p, t) in enumerate(zip(parents, tokens, strict=True))}
    path = [0]
    while (path[-1], target[path[-1]]) in children:
        path.append(children[path[-1], target[path[-1]]])
    return path


@torch.no_grad()
def greedy_plain(
    model: _Predictor, prompt: Sequence[int], max_tokens: int, end_token_ids: Sequence[int]
) -> list[int]:
    """Decode with the main stream alone, a token a call; the end token is part of the answer."""
    tokens: list[int] = []
    no_streams = torch.zeros(0, dtype=torch.long)
    while not _is_finished(tokens, max_tokens, end_token_ids):
        output = model(torch.tensor([[*prompt, *tokens]]), stream_rows=no_streams)
        tokens.append(int(output.main_logits[0, -1].argmax()))
    return tokens


@torch.no_grad()
def greedy_streaming(
    model: _Predictor,
    prompt: Sequence[int],
    *,
    width: int,
    max_tokens: int,
    end_token_ids: Sequence[int],
) -> tuple[list[int], int]:
    """Speculative Streaming with full trees and no pruning, recomputing everything every step.

    Args:
        model: the reference.
        prompt: [L] at least one token.
        width: k, the candidates of each stream.
        max_tokens: most tokens to generate.
        end_token_ids: tokens that end the answer, and are part of it.

    Returns:
        The tokens, and the target calls. The prompt's forward pass is the first call: a tree
        of its last token alone. No call follows an end token.
    """
    if not prompt:
        raise ValueError("the prompt has no tokens")
    committed, (tree_tokens, parents) = list(prompt[:-1]), full_tree(prompt[-1], [])
    generated: list[int] = []
    calls = 0
    while not _is_finished(generated, max_tokens, end_token_ids):
        input_ids, positions, visible = tree_inputs(committed, tree_tokens, parents)
        nodes = torch.arange(len(committed), input_ids.shape[1])
        output = model(input_ids, positions=positions, visible=visible, stream_rows=nodes)
        calls += 1
        target = output.main_logits[0, nodes].argmax(dim=-1).tolist()
        path = accepted_path(tree_tokens, parents, target)
        for node in path:
            committed.append(tree_tokens[node])
            if not _is_finished(generated, max_tokens, end_token_ids):
                generated.append(target[node])
        candidates = likeliest_tokens(output, path[-1], width)
        tree_tokens, parents = full_tree(target[path[-1]], candidates)
    return generated, calls


def _is_finished(tokens: Sequence[int], max_tokens: int, end_token_ids: Sequence[int]) -> bool:
    return len(tokens) >= max_tokens or (bool(tokens) and tokens[-1] in end_token_ids)
