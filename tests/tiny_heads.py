"""Random and rigged drafting heads for the models of `tiny` and `real`."""

import mlx.core as mx
import numpy as np

from ssmlx.drafters.head_drafter import HeadConfig
from ssmlx.drafters.heads import Heads, attach_heads, save_heads
from ssmlx.drafters.medusa import MedusaConfig
from ssmlx.drafters.mlp_speculator import MlpSpeculatorConfig
from ssmlx.loading.identity import BaseIdentity

HEAD_KINDS = ("medusa", "mlp-speculator")
LEVELS = 3


def head_config(kind: str, backbone, vocab=None, **changes) -> HeadConfig:
    """Settings of heads that guess LEVELS tokens ahead, among `vocab` if given."""
    both = {
        "vocab_size": backbone.vocab_size,
        "draft_vocab_size": 0 if vocab is None else len(vocab),
    }
    size = backbone.hidden_size or 8  # of some models nothing says it
    if kind == "medusa":
        own = {"num_heads": LEVELS, "num_layers": 1, "hidden_size": size}
        return MedusaConfig(**{**own, **both, **changes})
    own = {"emb_dim": size, "n_predict": LEVELS, "inner_dim": 24}
    return MlpSpeculatorConfig(**{**own, **both, **changes})


def random_heads(kind: str, backbone, *, vocab=None, seed: int = 0, **changes) -> Heads:
    """Heads of `backbone` of which every number does something."""
    config = head_config(kind, backbone, vocab, **changes)
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in config.tensor_shapes().items():
        mean = 1.0 if name.startswith("ln") and name.endswith("weight") else 0.0
        tensors[name] = mx.array(rng.normal(mean, 0.4, shape), mx.float32)
    if vocab:
        tensors["draft_vocab"] = mx.array(vocab, mx.int32)
    return Heads(config, tensors, BaseIdentity.of(backbone), "tiny")


def make_heads(kind: str, backbone, **settings):
    """Random heads, attached to `backbone`."""
    return attach_heads(random_heads(kind, backbone, **settings), backbone)


def cycle_heads(kind: str, backbone, *, vocab=None, num_right: int = LEVELS):
    """Heads for a model that says t + 1 after t, whose hidden state of t is along axis t.

    The first `num_right` levels guess what the model will say, the others always another token.
    """
    whole = {} if kind == "medusa" else {"inner_dim": 0}
    heads = random_heads(kind, backbone, vocab=vocab, **whole)
    count = backbone.vocab_size
    size = backbone.hidden_size or 8  # of some models nothing says it
    tokens = np.arange(count) if vocab is None else np.array(vocab)
    tensors = {name: mx.zeros_like(array) for name, array in heads.tensors.items()}
    tensors |= {name: array for name, array in heads.tensors.items() if name == "draft_vocab"}
    for level in range(LEVELS):
        ahead = (level + 2 if kind == "medusa" else 1) + (level >= num_right)
        matrix = 5 * mx.eye(count, size)[mx.array((tokens - ahead) % count)]
        if kind == "medusa":
            tensors[f"{level}.1.weight"] = matrix
        else:  # the state is the path's last token alone
            tensors[f"emb.{level}.weight"] = mx.eye(count, size)
            tensors[f"ln.{level}.weight"] = mx.ones(size)
            tensors[f"head.{level}.weight"] = matrix
    return attach_heads(Heads(heads.config, tensors, heads.base), backbone)


def random_reference(kind: str, backbone, vocab=None, *, seed: int = 0, **changes):
    """Heads in PyTorch of which every number does something."""
    import torch

    from convert.reference.heads import new_reference

    tokens = None if vocab is None else torch.tensor(vocab, dtype=torch.int32)
    model = new_reference(head_config(kind, backbone, vocab, **changes), tokens)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.4).add_(1.0 if parameter.ndim == 1 else 0.0)
    return model.eval()


def converted(model, backbone, folder):
    """The MLX folder of a reference, which goes through published files and the converter."""
    from convert.formats.heads import convert_heads, save_published_heads

    save_published_heads(model, folder / "published")
    (folder / "mlx").mkdir(exist_ok=True)
    save_heads(folder / "mlx", convert_heads(folder / "published", backbone, "tiny", "stored"))
    return folder / "mlx"


def token_paths(tree) -> set[tuple[int, ...]]:
    """Every node below the root, as the tokens that lead to it; each is there once."""
    tokens = tree.tokens.tolist()
    paths = tree.paths.tolist()
    depths = tree.depths.tolist()
    assert depths == sorted(depths) and depths[0] == 0
    found = []
    for node, (path, depth) in enumerate(zip(paths, depths, strict=True)):
        assert path[0] == 0 and set(path[depth:]) == {node}
        found.append(tuple(tokens[above] for above in path[1 : depth + 1]))
    assert len(set(found)) == len(found)
    return set(found) - {()}
