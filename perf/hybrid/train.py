"""Train a hybrid of ten million parameters, and a multi-token prediction head beside it.

The model is Qwen3.5's text model: three gated delta nets to one layer of attention. Its head is
that of Qwen3-Next and Qwen3.5, by vLLM's equations (`qwen3_next_mtp.py`):

    x = fc([norm_e(embed(token i+1)); norm_h(h_i)])      h_i: behind the model's final norm
    y = norm(layer(x))                                   one layer of attention, its own keys
    logits of token i+2 = the model's output head of y; y stands for h in the head's next step

It learns from a model that does not learn from it: h is detached.
"""

import argparse
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer, Qwen3_5RMSNorm


from .text import END, Source, read_sources

PROG = "perf.hybrid.train"
STATE = "training.pt"
WEIGHTS = {"sql": 0.3, "e2e": 0.2, "dialogsum": 0.1, "documents": 0.1, "python": 0.3}


@dataclass(frozen=True)
class Sizes:
    """Of the model; the head's layer is like the model's layers of attention."""

    vocab_size: int = 4096
    hidden_size: int = 384
    intermediate_size: int = 1024
    num_hidden_layers: int = 4
    num_attention_heads: int = 6
    num_key_value_heads: int = 2
    head_dim: int = 64
    linear_num_key_heads: int = 6
    linear_num_value_heads: int = 6
    linear_key_head_dim: int = 64
    linear_value_head_dim: int = 64


@dataclass(frozen=True)
class Schedule:
    """How long and how fast to learn.

    Attributes:
        minutes: of learning, on the clock, all runs together.
        batch: sequences a step.
        length: tokens of a sequence.
        rate: the highest learning rate, reached after `warm_up` steps; it falls to a tenth.
        save_minutes: how often all is saved.
    """

    minutes: float = 50.0
    batch: int = 8
    length: int = 256
    rate: float = 2e-3
    warm_up: int = 50
    save_minutes: float = 3.0


def make_config(sizes: Sizes) -> Qwen3_5TextConfig:
    """Make the configuration of the model."""
    rotated = sizes.head_dim // 4 // 2
    return Qwen3_5TextConfig(
        **asdict(sizes),
        tie_word_embeddings=True,
        max_position_embeddings=8192,
        full_attention_interval=4,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 100_000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [rotated - 2 * (rotated // 3), rotated // 3, rotated // 3],
        },
        attn_implementation="sdpa",
    )


class Head(nn.Module):
    """A multi-token prediction head; its parameters have the names of published checkpoints."""

    def __init__(self, config: Qwen3_5TextConfig) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(2 * width, width, bias=False)
        self.pre_fc_norm_embedding = Qwen3_5RMSNorm(width, eps=eps)
        self.pre_fc_norm_hidden = Qwen3_5RMSNorm(width, eps=eps)
        attention = config.layer_types.index("full_attention")
        self.layers = nn.ModuleList([Qwen3_5DecoderLayer(config, attention)])
        self.norm = Qwen3_5RMSNorm(width, eps=eps)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=config.initializer_range)
            elif isinstance(module, Qwen3_5RMSNorm):
                nn.init.zeros_(module.weight)

    def join(self, embeddings: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Join embeddings of tokens i+1 and hidden states of tokens i, [B, R, D] both, to [B, R, D]."""
        parts = self.pre_fc_norm_embedding(embeddings), self.pre_fc_norm_hidden(hidden)
        return self.fc(torch.cat(parts, dim=-1))

    def forward(
        self, joined: torch.Tensor, rotary: nn.Module, positions: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """Run the layer and the last norm.

        Args:
            joined: [B, R, D] of `join`.
            rotary: the model's, which makes the embeddings of positions.
            positions: [R] of the rows.
            mask: [R, R] true where a row sees another.

        Returns:
            [B, R, D].
        """
        embedded = rotary(joined, positions[None])
        visible = mask[None, None].expand(joined.shape[0], 1, -1, -1)
        return self.norm(
            self.layers[0](joined, position_embeddings=embedded, attention_mask=visible)
        )


def two_step_mask(length: int) -> torch.Tensor:
    """Make the mask of two steps of the head, one behind the other.

    Row i of the second step sees what it would see where it drafts: rows up to i of the first step,
    and itself.

    Args:
        length: rows of a step, R.

    Returns:
        [2 R, 2 R] true where a row sees another.
    """
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    own = torch.eye(length, dtype=torch.bool)
    first = torch.cat([causal, torch.zeros_like(causal)], dim=1)
    return torch.cat([first, torch.cat([causal, own], dim=1)])


def head_losses(
    model: Qwen3_5ForCausalLM, head: Head, tokens: torch.Tensor, hidden: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the head's losses one and two steps ahead of the model's own next token.

    The first step's output goes into the second without a gradient.

    Args:
        model: gives the embedding and the output head, neither of which learns here.
        head: learns.
        tokens: [B, L].
        hidden: [B, L, D] the model's hidden states behind its final norm, detached.

    Returns:
        Mean cross entropy of tokens i+2, then of tokens i+3.
    """
    rows = tokens.shape[1] - 3
    table = model.model.embed_tokens.weight.detach()
    rotary = model.model.rotary_emb
    positions = torch.arange(rows)
    first = head.join(F.embedding(tokens[:, 1 : rows + 1], table), hidden[:, :rows])
    with torch.no_grad():
        causal = torch.ones(rows, rows, dtype=torch.bool).tril()
        drafted = head(first, rotary, positions, causal)
    second = head.join(F.embedding(tokens[:, 2 : rows + 2], table), drafted)
    both = head(
        torch.cat([first, second], dim=1),
        rotary,
        torch.cat([positions, positions + 1]),
        two_step_mask(rows),
    )
    logits = F.linear(both, table).float()
    losses = [
        F.cross_entropy(
            logits[:, step * rows : (step + 1) * rows].flatten(0, 1),
            tokens[:, step + 2 : step + 2 + rows].flatten(),
        )
        for step in (0, 1)
    ]
    return losses[0], losses[1]


def train_tokenizer(sources: Sequence[Source], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE vocabulary on some of each source's text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (text for source in sources for text in _first(source.train, 1_500_000))
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _first(texts: Sequence[str], characters: int) -> Sequence[str]:
    """Return texts spread over all of `texts`, of so many characters at most."""
    total = sum(map(len, texts))
    return texts[:: max(1, math.ceil(total / characters))]


def encode_stream(tokenizer: Tokenizer, texts: Sequence[str]) -> np.ndarray:
    """Encode texts to one row of tokens, each text ended by `END`."""
    end = tokenizer.token_to_id(END)
    ids = [id for one in tokenizer.encode_batch(list(texts)) for id in (*one.ids, end)]
    return np.array(ids, np.int32)


class Sampler:
    """Draws sequences of training text, each source as often as its weight says."""

    def __init__(
        self, streams: dict[str, np.ndarray], weights: dict[str, float], length: int
    ) -> None:
        self._streams = {name: row for name, row in streams.items() if len(row) > length}
        shares = np.array([weights.get(name, 0.1) for name in self._streams])
        self._shares = shares / shares.sum()
        self._length = length

    def draw(self, random: np.random.Generator, batch: int) -> torch.Tensor:
        """Draw [batch, length] tokens."""
        names = list(self._streams)
        drawn = random.choice(len(names), size=batch, p=self._shares)
        rows = [self._cut(random, self._streams[names[one]]) for one in drawn]
        return torch.from_numpy(np.stack(rows).astype(np.int64))

    def _cut(self, random: np.random.Generator, row: np.ndarray) -> np.ndarray:
        start = int(random.integers(len(row) - self._length))
        return row[start : start + self._length]


class Run:
    """A model and a head that learn, and can go on where they were stopped."""

    def __init__(self, sizes: Sizes, schedule: Schedule, sampler: Sampler) -> None:
        torch.manual_seed(0)
        self.model = Qwen3_5ForCausalLM(make_config(sizes))
        self.head = Head(self.model.config)
        self.steps = 0
        self.seconds = 0.0
        self._schedule = schedule
        self._sampler = sampler
        both = [*self.model.parameters(), *self.head.parameters()]
        matrices = [one for one in both if one.ndim == 2]
        others = [one for one in both if one.ndim != 2]
        groups = [
            {"params": matrices, "weight_decay": 0.1},
            {"params": others, "weight_decay": 0.0},
        ]
        self._optimizer = torch.optim.AdamW(groups, lr=schedule.rate, betas=(0.9, 0.95))

    @property
    def is_done(self) -> bool:
        return self.seconds >= self._schedule.minutes * 60

    def step(self) -> list[float]:
        """Learn from one batch, and return the losses of the model and of the head's two steps."""
        started = time.perf_counter()
        for group in self._optimizer.param_groups:
            group["lr"] = self._rate()
        tokens = self._sampler.draw(np.random.default_rng(self.steps), self._schedule.batch)
        losses = self._losses(tokens)
        self._optimizer.zero_grad(set_to_none=True)
        torch.stack(losses).sum().backward()
        for module in (self.model, self.head):
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        self._optimizer.step()
        self.steps += 1
        self.seconds += time.perf_counter() - started
        return [float(loss.detach()) for loss in losses]

    def _losses(self, tokens: torch.Tensor) -> list[torch.Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = self.model.model(tokens, use_cache=False).last_hidden_state
            logits = self.model.lm_head(hidden[:, :-1]).float()
            own = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            return [own, *head_losses(self.model, self.head, tokens, hidden.detach())]

    def _rate(self) -> float:
        done = min(1.0, self.seconds / (self._schedule.minutes * 60))
        warm = min(1.0, (1 + self.steps) / self._schedule.warm_up)
        return self._schedule.rate * warm * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))

    def save(self, folder: Path) -> None:
        """Save all that `load` needs, in one file that is replaced at once."""
        state = {
            "model": self.model.state_dict(),
            "head": self.head.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "steps": self.steps,
            "seconds": self.seconds,
        }
        torch.save(state, folder / f"{STATE}.part")
        (folder / f"{STATE}.part").replace(folder / STATE)

    def load(self, folder: Path) -> None:
        """Go on from what `save` saved, if there is anything."""
        if (folder / STATE).exists():
            state = torch.load(folder / STATE, weights_only=True)
            self.model.load_state_dict(state["model"])
            self.head.load_state_dict(state["head"])
            self._optimizer.load_state_dict(state["optimizer"])
            self.steps, self.seconds = state["steps"], state["seconds"]


def save_checkpoint(model: Qwen3_5ForCausalLM, head: Head, folder: Path) -> None:
    """Write a folder as Qwen3.5's are published, which mlx-lm loads; the head lies in it as `mtp.`.

    Norms are stored as PyTorch's modules hold them: minus one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    text = {name: one for name, one in model.state_dict().items() if name != "lm_head.weight"}
    tensors = {name.replace("model.", "model.language_model.", 1): one for name, one in text.items()}
    tensors |= {f"mtp.{name}": one for name, one in head.state_dict().items()}
    whole = {name: one.detach().clone().contiguous() for name, one in tensors.items()}
    save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})
    text_config = model.config.to_dict() | {"mtp_num_hidden_layers": 1}
    config = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "tie_word_embeddings": True,
        "text_config": text_config,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the files of the tokenizer that mlx-lm reads."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "pad_token": END}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def prepare(
    out: Path, data: Path, documents: Path, vocab_size: int
) -> tuple[Tokenizer, dict[str, np.ndarray]]:
    """Make the tokenizer and the training text's tokens, or read those that `out` has."""
    made = out / "tokens.npz"
    if made.exists():
        with np.load(made) as streams:
            return Tokenizer.from_file(str(out / "tokenizer.json")), dict(streams)
    sources = read_sources(data, documents)
    tokenizer = train_tokenizer(sources, vocab_size)
    save_tokenizer(tokenizer, out)
    streams = {source.name: encode_stream(tokenizer, source.train) for source in sources}
    np.savez(made, **streams)
    return tokenizer, streams


def train(run: Run, out: Path, schedule: Schedule, say: Callable[[str], None]) -> None:
    """Learn until the schedule's minutes are over, saving as it says."""
    saved = run.seconds
    recent: list[list[float]] = []
    while not run.is_done:
        recent.append(run.step())
        if run.steps % 20 == 0:
            means = np.mean(recent, axis=0)
            losses = ", ".join(f"{mean:.3f}" for mean in means)
            rate = run.steps * schedule.batch * schedule.length / run.seconds
            say(f"step {run.steps}, {run.seconds:.0f} s, {rate:.0f} tokens/s: {losses}")
            recent.clear()
        if run.seconds - saved > schedule.save_minutes * 60 or run.is_done:
            run.save(out)
            save_checkpoint(run.model, run.head, out)
            saved = run.seconds


def make_options() -> argparse.ArgumentParser:
    """Make the command's options."""
    parser = argparse.ArgumentParser(prog=PROG, description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder of tasks' folders")
    parser.add_argument("--documents", type=Path, default=Path(), help="folder with Markdown")
    parser.add_argument("--out", type=Path, required=True, help="folder of the model")
    parser.add_argument("--minutes", type=float, default=Schedule.minutes)
    parser.add_argument("--batch", type=int, default=Schedule.batch)
    return parser


def main(argv: list[str] | None = None) -> Any:
    options = make_options().parse_args(argv)
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    sizes = Sizes()
    schedule = Schedule(minutes=options.minutes, batch=options.batch)
    _, streams = prepare(options.out, options.data, options.documents, sizes.vocab_size)
    counts = ", ".join(f"{name} {len(row):,}" for name, row in streams.items())
    print(f"tokens: {counts}", flush=True)
    run = Run(sizes, schedule, Sampler(streams, WEIGHTS, schedule.length))
    numbers = [sum(p.numel() for p in part.parameters()) for part in (run.model, run.head)]
    print(f"parameters: {numbers[0]:,}, head {numbers[1]:,}", flush=True)
    run.load(options.out)
    train(run, options.out, schedule, lambda line: print(line, flush=True))


if __name__ == "__main__":
    main()
