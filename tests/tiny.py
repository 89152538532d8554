"""Tiny random models for tests, and slow obvious versions of what the package computes."""

import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib import import_module
from itertools import combinations, product
from math import prod
from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.generate import generate_step
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from ssmlx.decoding.step import DraftTotals
from ssmlx.generation import time_calls
from ssmlx.generation.plan import decode_plan, make_plan
from ssmlx.loading.adapter import StreamAdapter
from ssmlx.loading.attach import attach_adapter
from ssmlx.loading.identity import BaseIdentity
from ssmlx.loading.load import OWN_FAMILIES
from ssmlx.mlx_thread import run_on_mlx_thread
from ssmlx.model.backbone import Backbone
from ssmlx.model.condition import Condition
from ssmlx.model.lora import LoraWeights, split_layer_path
from ssmlx.model.streams import LowRank, StreamFusedModel, StreamWeights
from ssmlx.model.tree import Tree
from ssmlx.policy.costs import BATCH, FrozenCosts
from ssmlx.settings import StreamConfig

LAYERS = 3
WIDTH = 32
VOCAB = 13
ARCHITECTURES = ("llama", "qwen2", "qwen3", "phi3", "mistral")
KINDS = (nn.Linear, nn.QuantizedLinear)
# Of latent attention, which caches keys and values of different widths; and experts.
LATENT = {
    "q_lora_rank": 24, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 32,
    "v_head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "moe_intermediate_size": 16, "first_k_dense_replace": 1, "num_key_value_heads": 4,
    "routed_scaling_factor": 1.5, "norm_topk_prob": True, "n_group": 1, "topk_group": 1,
}  # fmt: skip


def randomise(model: nn.Module, seed: int, std: float = 0.25) -> None:
    """Fill every parameter: matrices around 0, vectors around 1."""
    key = mx.random.key(seed)
    filled = []
    for name, value in tree_flatten(model.parameters()):
        key, own = mx.random.split(key)
        noise = std * mx.random.normal(value.shape, key=own)
        filled.append((name, noise if value.ndim > 1 or name.endswith("bias") else 1 + noise))
    model.update(tree_unflatten(filled))
    mx.eval(model.parameters())


def make_base(architecture: str = "llama", *, seed: int = 0, vocab: int = VOCAB, **changes):
    """A random model of a family of mlx-lm, or of `OWN_FAMILIES`."""
    sizes = {
        "model_type": architecture, "hidden_size": WIDTH, "num_hidden_layers": LAYERS,
        "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "rms_norm_eps": 1e-5, "vocab_size": vocab, "max_position_embeddings": 512,
        "tie_word_embeddings": architecture == "qwen2", "rope_theta": 1000.0,
    }  # fmt: skip
    # mlx-lm runs Mistral with its Llama code.
    home = {"mistral": "llama"}.get(architecture, architecture)
    module = OWN_FAMILIES.get(home) or import_module(f"mlx_lm.models.{home}")
    model = module.Model(module.ModelArgs.from_dict({**sizes, **changes}))
    randomise(model, seed)
    return model


def linears(model: nn.Module, first_layer: int) -> list[str]:
    """Paths of the linear modules from layer `first_layer` on."""
    found = [name for name, one in model.named_modules() if isinstance(one, KINDS)]
    in_layers = [name for name in found if "layers." in name]
    return sorted(name for name in in_layers if split_layer_path(name)[0] >= first_layer)


def make_lora(model: nn.Module, first_layer: int, seed: int, scale: float = 2.0):
    """Random LoRA of rank 2 on every linear module from layer `first_layer` on."""
    rng = np.random.default_rng(seed)
    lora = {}
    modules = dict(model.named_modules())
    for path in linears(model, first_layer):
        linear = modules[path]
        out_size, in_size = linear.weight.shape
        if isinstance(linear, nn.QuantizedLinear):
            in_size = in_size * 32 // linear.bits
        a = rng.normal(0, 0.2, (in_size, 2))
        b = rng.normal(0, 0.2, (2, out_size))
        lora[path] = LoraWeights(mx.array(a, mx.float32), mx.array(b, mx.float32), scale)
    return lora


def make_adapter(
    backbone: Backbone,
    scope: str = "all",
    *,
    seed: int = 1,
    lora_from: int | None = None,
    lora_scale: float = 2.0,
    draft_vocab: Sequence[int] = (),
    **changes,
) -> StreamAdapter:
    """Random streams, pruning adapter and LoRA for a backbone.

    Args:
        backbone: of the base.
        scope: of the adapter.
        seed: of the random numbers.
        lora_from: first layer with LoRA; None for the first with streams.
        lora_scale: of the LoRA.
        draft_vocab: token ids to draft from; all if empty.
        changes: fields of `StreamConfig`.
    """
    sizes = {"num_layers": len(backbone.layers), "hidden_size": backbone.hidden_size}
    sizes |= {"num_streams": 3, "num_msa_layers": 2, "prune_rank": 3, "adapter_scope": scope}
    config = StreamConfig(**{**sizes, "draft_vocab_size": len(draft_vocab), **changes})
    first_layer = config.insertion_layer if lora_from is None else lora_from
    lora = make_lora(backbone.model, first_layer, seed, lora_scale)
    rng = np.random.default_rng(seed + 1)
    size = config.hidden_size

    def normal(*shape: int) -> mx.array:
        return mx.array(rng.normal(0, 0.3, shape), mx.float32)

    def low_rank(rank: int, inputs: int = size) -> LowRank | None:
        return LowRank(normal(rank, inputs), normal(size, rank)) if rank else None

    streams = StreamWeights(
        normal(config.num_streams, size) if config.stream_design == "embeddings" else None,
        low_rank(config.stream_init_rank),
        low_rank(config.root_init_rank, 2 * size),
        low_rank(config.prune_rank),
        mx.array([*draft_vocab], mx.int32) if draft_vocab else None,
        make_condition(config.condition_rank, size, seed) if config.condition_rank else None,
    )
    base = BaseIdentity.of(backbone)
    return StreamAdapter(config=config, streams=streams, base=base).with_trained(lora)


def make_condition(rank: int, size: int, seed: int = 0, std: float = 0.25) -> Condition:
    """Random maps of a condition. Those of an untrained one do nothing, as `out` is zero."""
    rng = np.random.default_rng(seed)
    shapes = (rank, size), (rank, size), (size, rank)
    return Condition(*(mx.array(rng.normal(0, std, shape), mx.float32) for shape in shapes))


RESIDUAL = {"stream_init": "residual", "stream_init_rank": 3}


def make_model(
    architecture: str = "llama",
    scope: str = "all",
    *,
    base: nn.Module | None = None,
    adapter: dict | None = None,
    merge_lora: bool = True,
    seed: int = 0,
    **changes,
) -> StreamFusedModel:
    """A tiny model whose base, streams, pruning adapter and LoRA are random.

    Args:
        adapter: what `make_adapter` takes; `changes` are of the base.
    """
    backbone = Backbone(make_base(architecture, seed=seed, **changes) if base is None else base)
    weights = make_adapter(backbone, scope, seed=seed + 1, **{**RESIDUAL, **(adapter or {})})
    return attach_adapter(backbone, weights, merge_lora=merge_lora)


def target_of(architecture: str, scope: str, seed: int = 0, **changes) -> nn.Module:
    """The model whose answers `make_model` has to give: the base, with LoRA merged for "all"."""
    model = make_base(architecture, seed=seed, **changes)
    if scope == "all":
        modules = dict(model.named_modules())
        for path, lora in make_lora(model, LAYERS - 2, seed + 1).items():
            modules[path].weight = modules[path].weight + lora.scale * (lora.a @ lora.b).T
    return model


def make_packed_base(**changes) -> nn.Module:
    """A base of 4 bits, but for the one matrix of each layer whose width no group divides."""
    model = make_base(**changes)
    nn.quantize(model, group_size=32, bits=4, class_predicate=_is_packable)
    return model


def _is_packable(_path: str, module: nn.Module) -> bool:
    return hasattr(module, "to_quantized") and module.weight.shape[-1] % 32 == 0


def make_tokenizer(vocab: int = VOCAB, eos: int | None = None) -> TokenizerWrapper:
    """A tokenizer of the words w0, w1, ..."""
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(vocab)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=words)
    return TokenizerWrapper(fast, eos_token_ids=[] if eos is None else [eos])


def mlx_lm_tokens(model: nn.Module, prompt: list[int], count: int) -> list[int]:
    """What mlx-lm itself writes."""
    return [int(token) for token, _ in generate_step(mx.array(prompt), model, max_tokens=count)]


def token_steps(model, prompt: list[int], cache, config=None, *, context=(), **more):
    """Decode `prompt` without end, a step for each call; `config` and `more` as in `make_plan`.

    MLX runs on the thread that reads. The plan is made now.
    """
    plan = make_plan(model, config, context=cache.offset + len(prompt), **more)
    return filter(None, decode_plan(plan, model, prompt, cache, context=context))


def first_tokens(steps, count: int, totals: DraftTotals | None = None):
    """Take the first `count` tokens of a decoding loop; `totals` gets what was drafted.

    Returns:
        (tokens, number of tokens of each call). What the loop yields before there are tokens is
        left out.
    """
    tokens: list[int] = []
    lengths = []
    for step in filter(None, steps):
        tokens += step.tokens
        lengths.append(len(step.tokens))
        if totals is not None:
            totals.add_draft_of(step)
        if len(tokens) >= count:
            return tokens[:count], lengths
    raise AssertionError("a decoding loop ended")


def tree_from_parents(tokens: list[int], parents: list[int]) -> Tree:
    """A tree from tokens and parents in breadth-first order; `parents[0]` is ignored."""
    paths = [[0]]
    for node in range(1, len(tokens)):
        paths.append([*paths[parents[node]], node])
    levels = max(len(path) for path in paths)
    full = [path + [path[-1]] * (levels - len(path)) for path in paths]
    depths = [len(path) - 1 for path in paths]
    return Tree(
        mx.array(tokens, mx.int32),
        mx.array(depths, mx.int32),
        mx.array(full, mx.int32),
        1 + max((parents[node] for node in range(1, len(tokens))), default=0),
    )


def random_tree(rng: random.Random, num_nodes: int, vocab: int) -> Tree:
    """A random tree in breadth-first order, whose siblings have different tokens."""
    ranks: list[tuple[int, ...]] = [()]
    while len(ranks) < num_nodes:
        path = (*rng.choice(ranks), rng.randrange(vocab))
        if path not in ranks:
            ranks.append(path)
    ranks.sort(key=lambda path: (len(path), path))
    index = {path: node for node, path in enumerate(ranks)}
    tokens = [rng.randrange(vocab), *(path[-1] for path in ranks[1:])]
    return tree_from_parents(tokens, [0, *(index[path[:-1]] for path in ranks[1:])])


def best_rank_paths(probs: np.ndarray, count: int, width: int) -> set[tuple[int, ...]]:
    """The `count` best nodes of the full tree by product of `probs` [G, K], by brute force."""
    levels = probs.shape[0]
    nodes = [r for depth in range(levels + 1) for r in product(range(width), repeat=depth)]
    score = {r: prod(float(probs[level, rank]) for level, rank in enumerate(r)) for r in nodes}
    return set(sorted(nodes, key=lambda r: -score[r])[:count])


def assert_close(found, expected, bound: float = 1e-5) -> None:
    """Check that arrays differ by at most `bound` times the largest expected number."""
    found, expected = (np.asarray(part).astype(np.float64) for part in (found, expected))
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() <= bound * np.abs(expected).max()


class FakeClock:
    """A clock for tests: it advances by what `spend` says, and by `tick` at each reading."""

    def __init__(self, tick: float = 0.0, now: float = 0.0) -> None:
        self.now = now
        self.tick = tick

    def __call__(self) -> float:
        self.now += self.tick
        return self.now

    def spend(self, seconds: float) -> None:
        self.now += seconds


def let_calls_take(monkeypatch, seconds_of) -> None:
    """Let timed calls take so many seconds, by the nodes of their trees, on a clock of their own.

    The calls are real. The clock goes on with each of them, and with nothing else.
    """
    now = 0.0
    real_lower = StreamFusedModel.lower
    real_append = Backbone.append

    def lower(self, tree, *more):
        nonlocal now
        now += seconds_of(tree.num_nodes)
        return real_lower(self, tree, *more)

    def append(self, *args):
        nonlocal now
        now += seconds_of(1)
        return real_append(self, *args)

    monkeypatch.setattr(StreamFusedModel, "lower", lower)
    monkeypatch.setattr(Backbone, "append", append)
    monkeypatch.setattr(time_calls, "time", SimpleNamespace(perf_counter=lambda: now))


@contextmanager
def busy_mlx_thread():
    """While the MLX thread is in the middle of a call, others ask it for what the block submits."""
    gate = threading.Event()
    with ThreadPoolExecutor(3) as pool:
        pool.submit(run_on_mlx_thread, gate.wait)
        try:
            yield pool
            time.sleep(0.1)  # until all have asked
        finally:
            gate.set()


def all_pairs(*axes, times: int = 1, where=lambda *case: True) -> list[tuple]:
    """Few combinations of the axes' values, in which any two values of different axes meet.

    Args:
        times: in how many combinations they meet, if there are as many.
        where: whether a combination is possible.
    """
    possible = [case for case in product(*axes) if where(*case)]
    random.Random(0).shuffle(possible)
    pairs = {id(case): Counter(combinations(enumerate(map(id, case)), 2)) for case in possible}
    missing = Counter(dict.fromkeys(set().union(*pairs.values()), times))
    chosen: list[tuple] = []
    while missing and possible:  # each next one brings the most
        best = max(possible, key=lambda case: sum(missing[pair] for pair in pairs[id(case)]))
        possible.remove(best)
        chosen.append(best)
        missing -= pairs[id(best)]
    return chosen


def cost_shared_calls(patch: pytest.MonkeyPatch, calls_by_rows) -> None:
    """Let a call for several answers cost so many plain calls, by its rows; others cost as ever."""
    costs = FrozenCosts.calls
    patch.setattr(
        FrozenCosts,
        "calls",
        lambda self, kind: calls_by_rows(kind[1]) if kind[0] == BATCH else costs(self, kind),
    )


def slow(*cases, mark=pytest.mark.slow) -> list:
    """Mark cases of a parametrised test as slow, or with another mark."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=mark) for case in cases
    ]
