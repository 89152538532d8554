"""Text in, text out, with an exported model: what `ssmlx.stream_generate` is for MLX."""

import resource
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..errors import require
from ..generation.answer_end import AnswerText, StopChecker
from ..generation.segments import GenerationResponse, build_responses, token_ids
from ..json_files import read_json
from ..loading.load import load_tokenizer
from ..prompts import Prompt, check_text, encode, encode_with_template
from .backends import Backend, coreai_backend, coreml_backend
from .decode import SlotCache, speculative_decode
from .manifest import Manifest


@dataclass(frozen=True, eq=False)
class ExportedModel:
    """A model that `python -m ssmlx.export` wrote, ready to run."""

    backend: Backend
    manifest: Manifest
    tokenizer: TokenizerWrapper

    def make_cache(self) -> SlotCache:
        """An empty cache, for one conversation."""
        return SlotCache(self.backend.make_state(), self.manifest.num_slots)


def load(
    folder: str | Path,
    *,
    backend: Callable[[Path, Manifest], Backend] | None = None,
    compute_units: str | None = None,
) -> ExportedModel:
    """Load the folder that `python -m ssmlx.export` wrote.

    InputError if a file is missing or was changed, `compute_units` does not fit the package, or
    this machine cannot run it.

    Args:
        folder: given to it as `--out`.
        backend: called with the package's path and its manifest, returns what runs it; None for
            Core ML or Core AI, as the manifest says.
        compute_units: of Core ML, one of `backends.COMPUTE_UNITS`; None for those that the model
            was exported for. It does not reach a given `backend`.
    """
    folder = Path(folder)
    manifest = Manifest.read(folder)
    found = f"compute_units={compute_units} of Core AI"
    do = "omit it"
    is_idle = compute_units is not None and manifest.target != "coreml"
    require(not is_idle, found, expected="this option only with Core ML", do=do)
    package = manifest.unchanged_package(folder)
    settings = read_json(folder / "config.json", "the settings of the model that was exported")
    tokenizer = load_tokenizer(folder, settings)
    if backend is not None:
        made = backend(package, manifest)
    elif manifest.target == "coreai":
        made = coreai_backend(package, manifest)
    else:
        made = coreml_backend(package, manifest, compute_units)
    return ExportedModel(made, manifest, tokenizer)


def prompt_tokens(model: ExportedModel, prompt: str | Prompt) -> list[int]:
    """Tokenise a user's prompt, up to the answer's beginning, under the manifest's template, or
    else the tokenizer's chat template.

    Args:
        model: as `load` returns it.
        prompt: a text, or a mapping with "prompt" or "messages".
    """
    if not isinstance(prompt, Mapping):
        check_text(prompt)
        prompt = {"prompt": prompt}
    return encode_with_template(prompt, model.tokenizer, model.manifest.prompt_template)


def stream_generate(
    model: ExportedModel,
    prompt: str | Sequence[int],
    *,
    max_tokens: int = 256,
    cache: SlotCache | None = None,
) -> Iterator[GenerationResponse]:
    """Generate an answer, greedily, yielding a segment of it for each target call.

    It ends with an end token, after `max_tokens`, or when the context is full. The prompt is
    checked at once, and processed when the first segment is asked for.

    Args:
        model: as `load` returns it.
        prompt: text (a template, if any, already applied) or token ids.
        max_tokens: most tokens to generate, at least 1.
        cache: holds what comes before the prompt; it is left holding the prompt and the answer,
            except for at least the last token. None for a fresh one.
    """
    tokens = encode(prompt, model.tokenizer) if isinstance(prompt, str) else token_ids(prompt)
    cache = cache if cache is not None else model.make_cache()
    num_cached = cache.offset
    manifest = model.manifest
    _require_prompt_fits(manifest, num_cached, len(tokens))
    require(
        max_tokens >= 1,
        f"--max-tokens {max_tokens}",
        expected="at least 1",
        do="use a larger value",
    )
    room = manifest.num_slots - manifest.num_nodes
    ends = {*manifest.end_token_ids, *model.tokenizer.eos_token_ids}
    text = AnswerText(model.tokenizer)
    stop_checker = StopChecker(text, ends, max_tokens, is_full=lambda: cache.offset > room)
    return build_responses(
        speculative_decode(model.backend, manifest, tokens, cache, stop_checker.take),
        num_cached + len(tokens),
        num_cached,
        lambda reason: {"peak_memory": peak_bytes() / 1e9},
    )


def _require_prompt_fits(
    manifest: Manifest,
    num_cached: int,  # in the cache already
    num_tokens: int,  # of the prompt
) -> None:
    """The prompt's last chunk is filled up, and a draft tree must fit after it."""
    require(
        num_tokens > 0, "the prompt is empty", expected="at least one token", do="give a prompt"
    )
    chunks = -(-(num_tokens - 1) // manifest.chunk)
    after_prefill = num_cached + chunks * manifest.chunk
    require(
        max(after_prefill, num_cached + num_tokens - 1 + manifest.num_nodes) <= manifest.num_slots,
        f"the prompt has {num_tokens} tokens, after {num_cached} others",
        expected=f"room for an answer in a context of {manifest.num_slots}, and for whole "
        f"chunks of {manifest.chunk}",
        do="shorten it, or export with a larger --context",
    )


def peak_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def generate(
    model: ExportedModel,
    prompt: str | Sequence[int],
    *,
    max_tokens: int = 256,
    cache: SlotCache | None = None,
) -> str:
    """Generate an answer, greedily, and return its text.

    Args:
        model: as `load` returns it.
        prompt: text (a template, if any, already applied) or token ids.
        max_tokens: most tokens to generate, at least 1.
        cache: as for `stream_generate`.
    """
    responses = stream_generate(model, prompt, max_tokens=max_tokens, cache=cache)
    return "".join(response.text for response in responses)
