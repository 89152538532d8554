"""Folders on disk, as users have them: a random model with a tokenizer, and its adapters."""

import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

import ssmlx  # first: it prefers OpenBLAS

import mlx.core as mx  # isort: skip
import numpy as np
import tiny
from huggingface_hub.utils import close_session
from mlx.utils import tree_flatten
from mlx_lm.models.llama import Model, ModelArgs
from mlx_lm.utils import load_model, quantize_model, save_config, save_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from ssmlx.blas import HINT
from ssmlx.loading import load as loading
from ssmlx.loading.adapter import StreamAdapter, write_adapter
from ssmlx.loading.load import load_base
from ssmlx.training.data import Example

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "smollm2-135m-sql"
LAYERS = 4
WIDTH = 32
STREAMS = 2
VOCAB = 64
CONTEXT = 256
WORDS = ["<unk>", "<s>", "</s>", "user:", "model:", "system:", "|"]
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}model{% else %}{{ m.role }}{% endif %}"
    ": {{ m.content }} | {% endfor %}{% if add_generation_prompt %}model: {% endif %}"
)


def words(count: int, first: int = 0) -> str:
    """A text of `count` tokens of the tiny tokenizer."""
    return " ".join(f"w{(first + index) % 50}" for index in range(count))


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer of the words w0, w1, ... into a folder."""
    vocab = {word: index for index, word in enumerate(WORDS)}
    vocab |= {f"w{index}": len(WORDS) + index for index in range(VOCAB - len(WORDS))}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)


def write_base(
    folder: Path,
    *,
    seed: int = 0,
    layers: int = LAYERS,
    width: int = WIDTH,
    context: int = CONTEXT,
    vocab: int = VOCAB,
    norm: float = 1.0,
) -> Path:
    """Write the folder of a random Llama that mlx-lm and transformers load; it never ends an
    answer."""
    folder.mkdir(parents=True)
    sizes = {
        "model_type": "llama", "hidden_size": width, "num_hidden_layers": layers,
        "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "rms_norm_eps": 1e-5, "vocab_size": vocab, "max_position_embeddings": context,
        "tie_word_embeddings": False, "rope_theta": 10000.0,
    }  # fmt: skip
    model = Model(ModelArgs.from_dict(sizes))
    key = mx.random.key(seed)
    weights = []
    for name, old in tree_flatten(model.parameters()):
        key, own = mx.random.split(key)
        drawn = 0.3 * mx.random.normal(old.shape, key=own)
        new = mx.full(old.shape, norm) if "norm" in name else drawn
        weights.append((name, new))
    model.load_weights(weights)
    model.lm_head.weight[2] = 0.0  # the end token's logit stays 0, below the others' largest
    save_model(folder, model)
    more = {"architectures": ["LlamaForCausalLM"], "bos_token_id": 1, "eos_token_id": 2}
    save_config({**sizes, **more}, folder / "config.json")
    write_tokenizer(folder)
    return folder


def write_packed(folder: Path, base: Path, *, dtype: mx.Dtype | None = None, **options) -> Path:
    """Write a quantised copy of a `write_base` folder as mlx-lm does; 4 bits unless `options`
    differ."""
    model, config = load_model(base)
    if dtype is not None:
        model.set_dtype(dtype)
    model, config = quantize_model(model, config, **{"group_size": 32, "bits": 4, **options})
    folder.mkdir(exist_ok=True)
    save_model(folder, model)
    save_config(config, folder / "config.json")
    for path in base.glob("*token*") if base != folder else ():
        shutil.copy(path, folder)
    return folder


def make_adapter(
    base: Path, *, scope: str = "all", template: str | None = None, **changes
) -> StreamAdapter:
    """Random streams, pruning adapter and LoRA for a folder of `write_base`."""
    return tiny.make_adapter(
        load_base(base, "float32")[0],
        scope,
        num_streams=STREAMS,
        prune_rank=4,
        prompt_template=template,
        base_model="tiny",
        **changes,
    )


def write_tiny_adapter(folder: Path, base: Path, **settings) -> Path:
    """Write what `make_adapter` makes into a folder, and return the folder."""
    folder.mkdir(parents=True)
    write_adapter(folder, make_adapter(base, **settings))
    return folder


def without_prune(adapter: StreamAdapter) -> StreamAdapter:
    streams = replace(adapter.streams, prune=None)
    return replace(adapter, config=replace(adapter.config, prune_rank=0), streams=streams)


def questions(numbers) -> list[dict]:
    """Examples by number: a prompt of one to three words, and the five words that follow them."""
    return [
        {"prompt": words(1 + i % 3, first=i), "completion": words(5, first=i + i % 3 + 1)}
        for i in numbers
    ]


def write_data(folder: Path, train: list[dict], valid: list[dict] | None = None) -> Path:
    """Write train.jsonl and valid.jsonl; without `valid`, both are `train`."""
    folder.mkdir(exist_ok=True, parents=True)
    for name, lines in (("train", train), ("valid", valid or train)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    return folder


def random_examples(count: int, vocab: int = VOCAB, seed: int = 0) -> list[Example]:
    """Examples with prompts of 1 to 4 random tokens and answers of 2 to 8."""
    rng = np.random.default_rng(seed)
    sizes = [(int(rng.integers(1, 5)), int(rng.integers(2, 9))) for _ in range(count)]
    return [Example(rng.integers(0, vocab, p + a).astype(np.int32), p) for p, a in sizes]


def snapshot(folder: Path) -> dict[str, bytes]:
    """The bytes of every file below a folder, by relative path; hidden files too."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def run_module(*args: str, stdin: str = "", **options) -> subprocess.CompletedProcess:
    """Run `python -m ...` in the checkout; `options` are those of `subprocess.run`."""
    return subprocess.run(
        [sys.executable, "-m", *args],
        input=stdin,
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=120,
        env={**os.environ, "TERM": "dumb"},
        **options,
    )


def on_a_terminal(module: str, *args: object, typed: bytes = b"", prompt: bytes = b"") -> tuple:
    """Run `python -m module` on a terminal of its own, and type once it has shown `prompt`.

    Returns:
        Its exit code, and all that the terminal was sent.
    """
    here, there = pty.openpty()
    command = [sys.executable, "-m", module, *map(str, args)]
    process = subprocess.Popen(command, cwd=ROOT, stdin=there, stdout=there, stderr=there)
    os.close(there)
    shown = b""
    with suppress(OSError):  # Linux says so at the end of a terminal
        while more := os.read(here, 4096):
            shown += more
            if typed and prompt in shown:
                os.write(here, typed)
                typed = b""
    os.close(here)
    return process.wait(120), shown.decode()


_AS_HERE = """
import runpy, sys
import ssmlx
import mlx.core
if (threads := int(sys.argv.pop(1))):
    import torch
    torch.set_num_threads(threads)
sys.argv.pop(0)
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


def kill_once_there(path: Path, module: str, arguments: list[str]) -> None:
    """Run `python -m module` and kill it as soon as `path` exists.

    It computes bit for bit what this process would: it loads libraries in the same order, so that
    both use the same BLAS, and as many threads.
    """
    threads = sys.modules["torch"].get_num_threads() if "torch" in sys.modules else 0
    command = [sys.executable, "-c", _AS_HERE, str(threads), module, *arguments]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 120
    while not path.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    err = process.communicate()[1].decode()
    assert path.exists(), err


def said_later(err: str) -> list[str]:
    """The lines that a chat prints after the two about drafting.

    Those about this machine are left out: what takes long, and that its BLAS is slow.
    """
    lines = [line for line in err.splitlines() if line != HINT and not line.endswith(" ...")]
    return lines[2:]


def tokens_of(responses):
    return [token for one in responses for token in one.tokens]


def answer(model, tokenizer, prompt, **settings):
    """Return (token ids, last response) of an answer by ssmlx."""
    responses = list(ssmlx.stream_generate(model, tokenizer, prompt, **settings))
    return tokens_of(responses), responses[-1]


@contextmanager
def answering(answer):
    """Run an HTTP server on this machine inside the block.

    Args:
        answer: maps (path, headers) to (status, headers, body) for GET and HEAD.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            status, headers, body = answer(self.path, self.headers)
            self.send_response(status)
            for name, value in {"Content-Length": len(body), **headers}.items():
                self.send_header(name, str(value))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET  # noqa: N815

        def log_message(self, *values): ...

    with pytest.MonkeyPatch.context() as patch:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            patch.delenv(name, raising=False)
        close_session()  # one from before may have read them
        with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
            Thread(target=server.serve_forever, daemon=True).start()
            yield server
            server.shutdown()


def fuse(base: Path, target: Path) -> Path:
    from convert.formats.adapter import write_fused_model

    backbone, config = loading.load_base(base, "float32")
    words = loading.load_tokenizer(base, config)
    target.mkdir()
    write_fused_model(target, make_adapter(base), backbone, words, config)
    return target
