"""The losses of drafters on a frozen model, and held-out text replayed with them.

Head h guesses the token h + 2 places after a row of final-normed hidden states, as stream h + 1
does: so the batches, the schedule and the saved state are those of the stream trainer.

A draft model keeps the base's embedding, first K layers, final norm and LM head. Layers and norm
are trained. The first ones, because each of them then sees the states that it was pretrained on:
only the norm and the head meet others. So it is a stream-fused model without streams, whose upper
layers are all that it has, and its loss is that of the main stream.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn

from ssmlx.drafters.head_drafter import HeadConfig
from ssmlx.errors import unwritable
from ssmlx.loading.files import new_folder
from ssmlx.settings import MAX_EDGE_LOGPROB, MIN_EDGE_LOGPROB, StreamConfig, read_json
from ssmlx.training.config import TrainConfig
from ssmlx.training.data import Batch, draft_indices
from ssmlx.training.objective import MAIN, STREAM
from ssmlx.training.replay import Replay

from ..base import copy_settings, load_base
from ..reference.checkpoint import fine_tuned
from ..reference.heads import HeadReference, MedusaReference, MlpSpeculatorReference, new_reference
from ..reference.model import StreamFusedReference, places_of
from .run import TorchObjective, freeze_base, precision

_TRAINED = ("layers", "norm", "final_layernorm", "final_layer_norm")
# What a config.json says of the weights that it came with; those written here are float32.
_OF_THE_WEIGHTS = ("quantization", "quantization_config", "dtype", "torch_dtype")


def build_heads(
    config: HeadConfig, draft_vocab: np.ndarray | None, seed: int, lm_head: torch.Tensor
) -> HeadReference:
    """New heads: a speculator's drawn from the run's seed, Medusa's saying what `lm_head` does."""
    torch.manual_seed(seed)
    model = new_reference(config, None if draft_vocab is None else torch.from_numpy(draft_vocab))
    if isinstance(model, MedusaReference):
        model.start_from(lm_head)
    return model


def load_frozen(path: Path, lora: Path | None) -> StreamFusedReference:
    """The model that heads are trained for: a base model, or one with a LoRA, see `fine_tuned`."""
    base = load_base(path, attn_implementation="sdpa")
    if lora is not None:
        base = fine_tuned(base, lora)
    config = StreamConfig(
        num_streams=0,
        num_msa_layers=1,
        num_layers=base.config.num_hidden_layers,
        hidden_size=base.config.hidden_size,
    )
    return StreamFusedReference(base, config)


class HeadObjective(TorchObjective):
    """Weighted cross-entropies of every head, over the hidden states of a model frozen here.

    In `train`, `stream_weights` stand for the heads'; `widths` are of the tree that a replay
    drafts with an MLP speculator.
    """

    def __init__(
        self,
        model: HeadReference,
        frozen: StreamFusedReference,
        train: TrainConfig,
        widths: Sequence[int],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        frozen.to(device).requires_grad_(False)
        freeze_base(frozen, dtype)
        vocab = None if model.draft_vocab is None else model.draft_vocab.cpu().numpy()
        super().__init__(frozen, train, vocab, device, dtype)
        self._frozen = frozen
        self._widths = tuple(widths)
        self.model: Any = model.to(device)

    @torch.no_grad()
    def lower(self, batch: Batch) -> torch.Tensor:
        """[B, T, D] final-normed hidden states, the same however the heads change."""
        tokens = self.tensor(batch.tokens)
        nothing = torch.arange(0, device=self.device)
        with precision(self.device, self.dtype):
            hidden = self._frozen.hidden_states(tokens, stream_rows=nothing, **self.where(batch))
        return hidden.main.to(self.dtype)

    def loss(
        self, batch: Batch, lower: torch.Tensor, step: int = 0
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """The weighted sum, and each head's mean in nats a token; `step` changes nothing."""
        heads = zip(self._rows(batch, lower), self.train.alphas, strict=True)
        found = []
        for number, ((states, *head), alpha) in enumerate(heads, 1):
            targets = self.tensor(draft_indices(batch.targets(number), self.draft_vocab))
            found.append((f"head_{number}", alpha, states, head, targets))
        return self.sum_of(found)

    def _rows(self, batch: Batch, lower: torch.Tensor) -> list[Any]:
        """Every head's states of a batch [B, K, W], and the matrix and bias that they go to."""
        levels = range(self.model.config.num_levels)
        # Where the text has ended there is no target either.
        text = torch.stack([self.tensor(batch.targets(level)) for level in levels], dim=-1)
        with precision(self.device, self.dtype):
            rows = self.model.rows(
                self._carried(batch, lower), text.clamp(min=0), self._lm_heads[STREAM]
            )
            return [(row.to(self.dtype), weight.to(self.dtype), bias) for row, weight, bias in rows]

    def _carried(self, batch: Batch, lower: torch.Tensor) -> torch.Tensor:
        """[B, K, D] the states that heads guess from."""
        return lower[places_of(torch.from_numpy(batch.carriers))].to(self.device).float()

    @torch.no_grad()
    def ranked(
        self, batch: Batch, lower: torch.Tensor, count: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """[B, K, G, count] the likeliest tokens of every Medusa head, and log probabilities."""
        found: list[Any] = []
        for row in self._rows(batch, lower):
            logits = nn.functional.linear(*row)
            found.append(logits.float().log_softmax(-1).topk(count))
        tokens = torch.stack([best.indices for best in found], dim=2).cpu().numpy()
        logprobs = torch.stack([best.values for best in found], dim=2)
        tokens = tokens if self.draft_vocab is None else self.draft_vocab[tokens]
        return tokens, logprobs.cpu().numpy()

    @torch.no_grad()
    def replay(self, batch: Batch, lower: torch.Tensor, size: int) -> Replay | None:
        if not isinstance(self.model, MlpSpeculatorReference):
            return super().replay(batch, lower, size)
        # All answers side by side: a stage's guesses depend on the path.
        hidden = self._carried(batch, lower)
        texts = [answer.tolist() for *_, answer in batch.answers()]
        places = [0] * len(texts)
        calls = len(texts)
        widths = tuple(min(width, self.draft_vocab_size) for width in self._widths)
        while True:
            rows = [row for row, text in enumerate(texts) if places[row] + 1 < len(text)]
            if not rows:
                return Replay(sum(map(len, texts)), calls)
            roots = self.tensor(np.array([texts[row][places[row]] for row in rows]))
            with precision(self.device, self.dtype):
                states = hidden[rows, [places[row] for row in rows]]
                tokens, edges = self.model.rank_paths(roots, states, widths)
            for place, row in enumerate(rows):
                following = texts[row][places[row] + 1 :]
                said = [level[place].cpu().numpy() for level in tokens]
                sure = [level[place].cpu().numpy() for level in edges]
                places[row] += 1 + accepted_depth(said, sure, widths, size, following)
                calls += 1


def accepted_depth(
    tokens: Sequence[np.ndarray],
    edges: Sequence[np.ndarray],
    widths: Sequence[int],
    keep: int,
    following: Sequence[int],
) -> int:
    """How far down the `keep` best nodes of a full tree, its root included, say what follows.

    `tokens` and the log probabilities of `edges` are of level i [widths[0] * ... * widths[i]],
    path by path.
    """
    sums = []
    above = np.zeros(1)
    for own, width in zip(edges, widths, strict=True):
        above = np.repeat(above, width) + np.clip(own, MIN_EDGE_LOGPROB, MAX_EDGE_LOGPROB)
        sums.append(above)
    every = np.concatenate(sums)
    least = np.sort(every)[-min(keep - 1, len(every))] if keep > 1 else np.inf
    beam = 0
    depth = 0
    for level, width, wanted in zip(range(len(widths)), widths, following, strict=False):
        children = np.arange(beam * width, (beam + 1) * width)
        agreeing = children[tokens[level][children] == wanted]
        if not len(agreeing) or sums[level][agreeing[0]] < least:
            break
        beam = int(agreeing[0])
        depth = depth + 1
    return depth


def load_first_layers(path: Path, num_layers: int) -> Any:
    """A base model of transformers in float32, without its layers from `num_layers` on."""
    base = load_base(path, attn_implementation="sdpa")
    decoder = base.get_decoder()
    decoder.layers = decoder.layers[:num_layers]
    base.config.num_hidden_layers = num_layers
    if getattr(base.config, "layer_types", None):
        base.config.layer_types = base.config.layer_types[:num_layers]
    return base


def build_draft(path: Path, config: StreamConfig, num_layers: int) -> StreamFusedReference:
    """The draft model of K layers, these and its norm to be trained."""
    settings = replace(config, num_layers=num_layers, num_msa_layers=num_layers)
    model = StreamFusedReference(load_first_layers(path, num_layers), settings)
    for name in _TRAINED:
        part = getattr(model.decoder.module, name, None)
        if part is not None:
            part.requires_grad_(True)
    return model


class DraftObjective(TorchObjective):
    """Cross-entropy of the answers, and held-out text replayed with chains of drafted tokens."""

    @torch.no_grad()
    def replay(self, batch: Batch, lower: torch.Tensor, size: int) -> Replay:
        """The target calls of decoding the answers with chains of `size` drafted tokens."""
        hidden = self.upper(batch, lower.to(self.device)).main
        carriers = self.tensor(batch.carriers)
        num_tokens = num_calls = 0
        for row, places, answer in batch.answers():
            states = hidden[row, carriers[row, places]]
            said = self.logits(states, MAIN).argmax(-1).cpu().numpy()
            num_tokens += len(answer)
            num_calls += chain_calls(said == answer, size)
        return Replay(num_tokens, num_calls)


def chain_calls(agrees: np.ndarray, num_draft_tokens: int) -> int:
    """Target calls that an answer takes; the first comes with the prompt.

    As long as a chain agrees with the text, its next token is the one that the text before it
    calls for: so one forward over the text tells where every chain would end.

    `agrees` [A] says whether the draft model's likeliest token is the answer's.
    """
    place = 0
    calls = 1
    while place + 1 < len(agrees):
        # The call before gave the token at `place`; the chain goes on from it.
        chain = agrees[place + 1 : place + 1 + num_draft_tokens]
        place += 1 + (len(chain) if chain.all() else int(chain.argmin()))
        calls += 1
    return calls


def trained_weights(model: StreamFusedReference) -> dict[str, torch.Tensor]:
    named = model.base.named_parameters()
    return {name: p.detach().cpu() for name, p in named if p.requires_grad}


def write_draft(
    trained: Mapping[str, torch.Tensor], source: Path, num_layers: int, target: Path
) -> None:
    """Write a model folder that mlx-lm and transformers load, in float32.

    What was not `trained` is the base model's, unrounded, of the folder `source`. A folder `target`
    that exists is replaced.
    """
    base = load_first_layers(source, num_layers)
    base.load_state_dict(trained, strict=False)
    tensors = base.state_dict()
    if base.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    settings = read_json(source / "config.json", "a model folder")
    settings = {name: value for name, value in settings.items() if name not in _OF_THE_WEIGHTS}
    settings["num_hidden_layers"] = num_layers
    if settings.get("layer_types"):
        settings["layer_types"] = settings["layer_types"][:num_layers]
    with new_folder(target) as folder:
        copy_settings(source, folder)
        try:
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        except SafetensorError as error:  # a full disk
            raise unwritable(folder, error) from error
        (folder / "config.json").write_text(json.dumps(settings, indent=1) + "\n")
