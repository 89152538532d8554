"""The PyTorch side of tests: tiny models of transformers, and the oracle of the MLX loops.

The oracle decodes with the reference, slow and obvious: every step computes everything anew.
"""

from collections.abc import Sequence

import numpy as np
import pytest

# What needs them is skipped without them, whatever imports this.
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from tiny import first_tokens, token_steps, tree_from_parents

from convert.formats.adapter import read_checkpoint
from convert.reference.checkpoint import save_reference
from convert.reference.format import LoraSettings
from convert.reference.model import StreamFusedReference
from ssmlx.decoding.loop import prefill
from ssmlx.loading.adapter import write_adapter
from ssmlx.loading.load import load_base
from ssmlx.settings import StreamConfig, TreeConfig

ARCHITECTURES = ("Llama", "Qwen2", "Qwen3", "Phi3", "Mistral")
LAYERS = 4
WIDTH = 32
VOCAB = 97
STREAMS = 2
LORA = LoraSettings(3, 6)
SIZES = {
    "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 128, "initializer_range": 0.2, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip


def make_base(architecture="Llama", *, vocab=VOCAB, seed=0, attention="eager", **changes):
    """A random model of transformers; `changes` are fields of its configuration."""
    torch.manual_seed(seed)
    sizes = {**SIZES, "vocab_size": vocab, "tie_word_embeddings": False, **changes}
    if architecture == "Phi3":
        del sizes["head_dim"]
    config = getattr(transformers, f"{architecture}Config")(**sizes)
    model_class = getattr(transformers, f"{architecture}ForCausalLM")
    return model_class._from_config(config, attn_implementation=attention).eval()


def stream_config(**changes):
    """The stream settings of the tiny PyTorch model, with `changes`."""
    values = {
        "num_streams": STREAMS, "num_msa_layers": 2, "num_layers": LAYERS, "hidden_size": WIDTH,
        "prune_rank": 4,
    }  # fmt: skip
    return StreamConfig(**{**values, **changes})


def make_model(architecture="Llama", *, base=None, lora=LORA, draft_vocab=None, **config):
    """A model whose every adapter does something."""
    model = StreamFusedReference(
        make_base(architecture) if base is None else base,
        stream_config(**config),
        lora=lora,
        draft_vocab=draft_vocab,
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.3)
    return model


def convert(folder, reference):
    """Convert a reference to an MLX adapter folder.

    Args:
        folder: the base is in its subfolder `base`.
        reference: the PyTorch model.

    Returns:
        (the adapter's folder, the base's backbone)
    """
    checkpoint = folder / "checkpoint"
    adapter = folder / "adapter"
    save_reference(reference, checkpoint)
    adapter.mkdir()
    backbone, _ = load_base(folder / "base", "float32")
    streams = checkpoint / "streams.safetensors"
    write_adapter(adapter, read_checkpoint(checkpoint, streams, backbone))
    return adapter, backbone


def some_tokens(length, *, batch=1, vocab=VOCAB, seed=1):
    return torch.randint(vocab, (batch, length), generator=torch.Generator().manual_seed(seed))


def mlx_step(model, prompt, tokens, parents):
    """Main, stream and early-exit logits of MLX for a tree after a prompt."""
    tree = tree_from_parents(tokens, parents)
    cache = model.make_cache()
    prefill(model, prompt, cache)
    cache.reserve(more_tokens=1, step_rows=tree.num_nodes * (1 + STREAMS))
    hidden = model.lower(tree, cache)
    early = model.early_exit_logits(hidden)
    rows = model.upper(model.insert(hidden, STREAMS), tree, cache, STREAMS)
    nodes = tree.num_nodes
    streams = model.backbone.logits(rows[:, nodes:], model.draft_head).reshape(nodes, STREAMS, -1)
    return model.backbone.logits(rows[:, :nodes]), streams, early


@torch.no_grad()
def reference_step(reference, prompt, tokens, parents):
    """The same of the PyTorch reference."""
    input_ids, positions, visible = tree_inputs(prompt, tokens, parents)
    nodes = torch.arange(len(prompt), input_ids.shape[1])
    found = reference(input_ids, positions=positions, visible=visible, stream_rows=nodes)
    return found.main_logits[0, nodes], found.stream_logits[0], found.early_exit_logits[0, nodes]


def gap(mine, theirs):
    """The largest difference of two arrays, over the largest absolute number."""
    mine, theirs = (
        array.detach().numpy() if isinstance(array, torch.Tensor) else np.array(array)
        for array in (mine, theirs)
    )
    assert mine.shape == theirs.shape
    return np.abs(mine - theirs).max() / max(np.abs(theirs).max(), 1e-12)


def assert_close(found, expected):
    """Logits of tens, in float32: MLX's are PyTorch's."""
    for mine, theirs in zip(found, expected, strict=True):
        assert gap(mine, theirs) < 1e-4


def tree_inputs(
    prompt: Sequence[int], tokens: Sequence[int], parents: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A prompt and the draft tree after it, as `forward` takes them (section 3.2.2, eq. 4).

    A node at depth d stands at position len(prompt) + d and sees the prompt, its ancestors and
    itself; the parent of node 0, the root, is -1.
    """
    length = len(prompt)
    total = len(prompt) + len(tokens)
    positions = torch.arange(total)
    visible = torch.ones(total, total, dtype=torch.bool).tril()
    for node, parent in enumerate(parents):
        row = length + node
        above = length + parent
        visible[row, length:] = False if parent < 0 else visible[above, length:]
        visible[row, row] = True
        positions[row] = length if parent < 0 else positions[above] + 1
    return torch.tensor([[*prompt, *tokens]]), positions[None], visible[None]


def full_tree(root: int, candidates: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
    """Tokens and parents of every combination of candidates [G][k], breadth first (A.1)."""
    tokens = [root]
    parents = [-1]
    level = [0]
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
    """The nodes from the root along children that carry the target's own token after each."""
    children = {(p, t): node for node, (p, t) in enumerate(zip(parents, tokens, strict=True))}
    path = [0]
    while (path[-1], target[path[-1]]) in children:
        path.append(children[path[-1], target[path[-1]]])
    return path


@torch.no_grad()
def greedy_plain(model: StreamFusedReference, prompt: Sequence[int], max_tokens: int) -> list[int]:
    """Decode with the main stream alone, a token a call."""
    tokens: list[int] = []
    no_streams = torch.zeros(0, dtype=torch.long)
    while len(tokens) < max_tokens:
        output = model(torch.tensor([[*prompt, *tokens]]), stream_rows=no_streams)
        tokens.append(int(output.main_logits[0, -1].argmax()))
    return tokens


@torch.no_grad()
def greedy_speculative(
    model: StreamFusedReference, prompt: Sequence[int], *, width: int, max_tokens: int
) -> tuple[list[int], int]:
    """Speculative Streaming with full trees of `width` children and no pruning.

    Returns:
        The tokens, and the target calls: the prompt's forward pass is the first, a tree of its
        last token alone.
    """
    committed, (tree_tokens, parents) = list(prompt[:-1]), full_tree(prompt[-1], [])
    generated: list[int] = []
    calls = 0
    while len(generated) < max_tokens:
        input_ids, positions, visible = tree_inputs(committed, tree_tokens, parents)
        nodes = torch.arange(len(committed), input_ids.shape[1])
        output = model(input_ids, positions=positions, visible=visible, stream_rows=nodes)
        calls += 1
        target = output.main_logits[0, nodes].argmax(dim=-1).tolist()
        path = accepted_path(tree_tokens, parents, target)
        committed += [tree_tokens[node] for node in path]
        generated += [target[node] for node in path]
        logits = output.stream_logits[0, path[-1]]  # [G, Vd]
        ranked = logits.topk(min(width, logits.shape[-1])).indices
        candidates = ranked if output.draft_vocab is None else output.draft_vocab[ranked]
        tree_tokens, parents = full_tree(target[path[-1]], candidates.tolist())
    return generated[:max_tokens], calls


def assert_same_steps(reference, model, prompt, width):
    """MLX decodes with full trees of this width in PyTorch's tokens and calls."""
    tokens, calls = greedy_speculative(reference, prompt, width=width, max_tokens=14)
    tree = TreeConfig(kind="full", width=width)
    found, lengths = first_tokens(token_steps(model, prompt, model.make_cache(), tree=tree), 14)
    assert (found, len(lengths)) == (tokens, calls)
