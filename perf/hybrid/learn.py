"""Trains a small hybrid of Qwen3.5's kind, and its MTP head beside it, in PyTorch."""

import io
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from pickle import UnpicklingError

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from ssmlx.errors import InputError, require
from ssmlx.loading.files import make_folder, write_whole

from .head import Head, losses_of_two_steps
from .schedule import Schedule
from .text import END, Source, read_sources

STATE = "training.pt"
WEIGHTS = {"sql": 0.3, "e2e": 0.2, "dialogsum": 0.1, "documents": 0.1, "python": 0.3}


@dataclass(frozen=True)
class Sizes:
    """Sizes of the model; the head's layer is like the model's layers of attention."""

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


def make_config(sizes: Sizes) -> Qwen3_5TextConfig:
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
    texts = (text for source in sources for text in _sample_evenly(source.train, 1_500_000))
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _sample_evenly(texts: Sequence[str], max_characters: int) -> Sequence[str]:
    """Take every n-th of the texts."""
    total = sum(map(len, texts))
    return texts[:: max(1, math.ceil(total / max_characters))]


def encode_into_one_row(tokenizer: Tokenizer, texts: Sequence[str]) -> np.ndarray:
    """Encode texts into one row; each ends with `END`."""
    end = tokenizer.token_to_id(END)
    ids = [id for one in tokenizer.encode_batch(list(texts)) for id in (*one.ids, end)]
    return np.array(ids, np.int32)


class Sampler:
    """Draws sequences of training text, each source as often as its weight says."""

    def __init__(
        self,
        streams: dict[str, np.ndarray],  # by source, its tokens in one row
        weights: dict[str, float],  # in any unit; 0.1 for sources that are not listed
        length: int,  # tokens of a sequence
    ) -> None:
        self._streams = {name: row for name, row in streams.items() if len(row) > length}
        require(
            bool(self._streams),
            "no source has enough text",
            expected=f"more than {length} tokens",
            do="give other --data",
        )
        shares = np.array([weights.get(name, 0.1) for name in self._streams])
        self._shares = shares / shares.sum()
        self._length = length

    def draw_sequences(self, random: np.random.Generator, count: int) -> torch.Tensor:
        """Draw [count, length]: a source for each row, then a position in it."""
        names = list(self._streams)
        drawn = random.choice(len(names), size=count, p=self._shares)
        rows = [self._cut_at_random(random, self._streams[names[one]]) for one in drawn]
        return torch.from_numpy(np.stack(rows).astype(np.int64))

    def _cut_at_random(self, random: np.random.Generator, row: np.ndarray) -> np.ndarray:
        start = int(random.integers(len(row) - self._length))
        return row[start : start + self._length]


class Run:
    """The training of a model and its head, which can continue after a stop."""

    def __init__(self, sizes: Sizes, schedule: Schedule, sampler: Sampler) -> None:
        """Make new weights; seeds PyTorch's own random numbers."""
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

    def learn_from_one_batch(self) -> list[float]:
        """Take a step; returns the losses before it: the model's, and the head's two."""
        started = time.perf_counter()
        for group in self._optimizer.param_groups:
            group["lr"] = self._learning_rate_now()
        # The batch depends only on the number of steps.
        tokens = self._sampler.draw_sequences(
            np.random.default_rng(self.steps), self._schedule.batch
        )
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
        """The model's loss, then the head's two, whose gradients do not reach the model."""
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = self.model.model(tokens, use_cache=False).last_hidden_state
            logits = self.model.lm_head(hidden[:, :-1]).float()
            own = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            return [own, *losses_of_two_steps(self.model, self.head, tokens, hidden.detach())]

    def _learning_rate_now(self) -> float:
        """The rate rises over the first steps, then falls with a cosine of the time."""
        done = min(1.0, self.seconds / (self._schedule.minutes * 60))
        warm = min(1.0, (1 + self.steps) / self._schedule.warm_up)
        return self._schedule.rate * warm * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))

    def save(self, folder: Path) -> None:
        """Save; if that fails, the earlier file stays."""
        state = {
            "model": self.model.state_dict(),
            "head": self.head.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "steps": self.steps,
            "seconds": self.seconds,
        }
        content = io.BytesIO()
        torch.save(state, content)
        write_whole(folder / STATE, content.getvalue())

    def load_if_saved(self, folder: Path) -> None:
        """Load a saved state; a broken file may be partly loaded by then."""
        if not (folder / STATE).exists():
            return
        try:
            state = torch.load(folder / STATE, weights_only=True)
            self.model.load_state_dict(state["model"])
            self.head.load_state_dict(state["head"])
            self._optimizer.load_state_dict(state["optimizer"])
            self.steps = state["steps"]
            self.seconds = state["seconds"]
        except (RuntimeError, ValueError, LookupError, EOFError, UnpicklingError) as error:
            reason, *_ = str(error).splitlines() or ["it is cut off"]
            raise InputError(
                f"{folder / STATE} cannot be read ({reason})",
                expected="what a run with these sizes saved",
                do="give another --out, or delete the file",
            ) from error


def save_checkpoint(model: Qwen3_5ForCausalLM, head: Head, folder: Path) -> None:
    """Write a folder in Qwen3.5's published form for mlx-lm; the head is in it as `mtp.`.

    Norms are stored as PyTorch's modules hold them: minus one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    text = {name: one for name, one in model.state_dict().items() if name != "lm_head.weight"}
    tensors = {
        name.replace("model.", "model.language_model.", 1): one for name, one in text.items()
    }
    tensors |= {f"mtp.{name}": one for name, one in head.state_dict().items()}
    content = save({name: one.detach() for name, one in tensors.items()}, {"format": "pt"})
    write_whole(folder / "model.safetensors", content)
    text_config = model.config.to_dict() | {"mtp_num_hidden_layers": 1}
    config = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "tie_word_embeddings": True,
        "text_config": text_config,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "pad_token": END}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def load_tokens(
    out: Path, data: Path, documents: Path, vocab_size: int
) -> tuple[Tokenizer, dict[str, np.ndarray]]:
    """Each source's training text as one row of tokens, read from tokens.npz if that exists."""
    made = out / "tokens.npz"
    if made.exists():
        with np.load(made) as streams:
            return Tokenizer.from_file(str(out / "tokenizer.json")), dict(streams)
    sources = read_sources(data, documents)
    tokenizer = train_tokenizer(sources, vocab_size)
    save_tokenizer(tokenizer, out)
    streams = {source.name: encode_into_one_row(tokenizer, source.train) for source in sources}
    content = io.BytesIO()
    np.savez(content, **streams)
    write_whole(made, content.getvalue())
    return tokenizer, streams


def train_and_save(
    run: Run,
    out: Path,
    schedule: Schedule,
    # receives a line every 20 steps, with the mean losses since the line before
    say: Callable[[str], None],
) -> None:
    saved = run.seconds
    recent: list[list[float]] = []
    while not run.is_done:
        recent.append(run.learn_from_one_batch())
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


def count_parameters(module: nn.Module) -> int:
    """Count parameters; shared ones count once."""
    return sum(one.numel() for one in module.parameters())


def train(
    data: Path,  # with a folder for each task
    documents: Path,  # its Markdown is read
    out: Path,
    schedule: Schedule,
) -> None:
    """Train; from here on PyTorch computes with one thread."""
    torch.set_num_threads(1)
    make_folder(out)
    sizes = Sizes()
    _, streams = load_tokens(out, data, documents, sizes.vocab_size)
    print("tokens:", ", ".join(f"{name} {len(row):,}" for name, row in streams.items()))
    run = Run(sizes, schedule, Sampler(streams, WEIGHTS, schedule.length))
    numbers = [count_parameters(part) for part in (run.model, run.head)]
    print(f"parameters: {numbers[0]:,}, of the head {numbers[1]:,}")
    run.load_if_saved(out)
    train_and_save(run, out, schedule, lambda line: print(line, flush=True))
