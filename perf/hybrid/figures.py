"""Measures a small hybrid and its MTP head, and the cost of going back after a rejection."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, Qwen3_5ForCausalLM, Qwen3_5TextConfig

import ssmlx
from ssmlx.decoding.call import plain_call, verify
from ssmlx.decoding.loop import prefill
from ssmlx.decoding.sampling import last_tokens
from ssmlx.drafters.mtp import load_mtp
from ssmlx.errors import require
from ssmlx.loading.files import make_folder
from ssmlx.model.streams import StreamFusedModel
from ssmlx.model.tree import chain_tree
from ssmlx.report import Columns
from ssmlx.settings import GenerateConfig, MtpConfig

from ..run.results import print_and_save
from ..run.show import markdown_table
from ..run.target import MLX_LM, PLAIN, answer_with_mlx_lm
from ..run.timing import TimedAnswer, answer_with_ssmlx
from .head import Head, draft_chains
from .learn import encode_into_one_row
from .text import Source, read_sources

DRAFTED = 4  # tokens of the chains that are timed and replayed


def cut_held_out_prompts(
    tokenizer: Tokenizer, sources: Sequence[Source], count: int, length: int
) -> list[list[int]]:
    """Cut prompts from the sources in turns, spread evenly over each source's text."""
    streams = [encode_into_one_row(tokenizer, source.held_out) for source in sources]
    streams = [row for row in streams if len(row) > length]
    require(
        bool(streams),
        "no source holds out enough text",
        expected=f"more than {length} tokens",
        do="lower --prompt-tokens, or give other --data",
    )
    each = -(-count // len(streams))
    prompts = []
    for cut in range(each):
        for row in streams:
            start = (len(row) - length) * (2 * cut + 1) // (2 * each)
            prompts.append([int(token) for token in row[start : start + length]])
    return prompts[:count]


def relative_logit_gap_to_transformers(folder: Path, tokens: Sequence[int]) -> float:
    """The largest absolute difference of logits, over the largest absolute logit."""
    model, _ = ssmlx.load(folder, dtype="float32")
    found = np.array(model.backbone.model(mx.array([tokens])), np.float32)
    reference, _ = load_torch_model(folder)
    with torch.no_grad():
        expected = reference(torch.tensor([tokens]), use_cache=False).logits.float().numpy()
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def load_torch_model(folder: Path) -> tuple[Qwen3_5ForCausalLM, Head]:
    """Load the model in float32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    head = Head(model.config)
    tensors = load_file(folder / "model.safetensors")
    head.load_state_dict(
        {name.removeprefix("mtp."): one for name, one in tensors.items() if name[:4] == "mtp."}
    )
    return model.eval(), head.eval()


class Text(NamedTuple):
    """Token ids of a prompt, and of plain decoding's answer to it."""

    prompt: list[int]
    answer: list[int]


@dataclass(frozen=True)
class SystemAnswers:
    system: str
    answers: Sequence[TimedAnswer]
    same_as_plain: int

    def row(self) -> dict[str, Any]:
        tokens = sum(len(answer.tokens) for answer in self.answers)
        calls = sum(answer.target_calls for answer in self.answers)
        return {
            "system": self.system,
            "tokens": tokens,
            "calls": calls,
            "tokens_per_call": tokens / calls,
            "levels": accepted_share_by_level(self.answers),
            "same_as_plain": self.same_as_plain,
            "answers": len(self.answers),
        }


def accepted_share_by_level(answers: Sequence[TimedAnswer]) -> list[float]:
    """At l: of calls with l + 2 rows or more, the share that accepted l + 1 drafted tokens."""
    calls = [call for answer in answers for call in answer.calls if call.drafter is not None]
    deepest = max((call.rows - 1 for call in calls), default=0)
    shares = []
    for level in range(1, min(deepest, 8) + 1):
        reaching = [call.tokens > level for call in calls if call.rows > level]
        shares.append(sum(reaching) / len(reaching))
    return shares


def make_drafting_systems(folder: Path, model: StreamFusedModel) -> dict[str, dict[str, Any]]:
    """The systems, as arguments of `ssmlx.stream_generate`."""
    # A deterministic controller reads no seconds: its drafts are the same on every machine.
    head = load_mtp(model, folder)
    chains = {
        f"mtp tokens={count}": {
            "config": GenerateConfig(decoding="speculative", temp=0),
            "drafter": head,
            "drafter_settings": MtpConfig(num_draft_tokens=count),
        }
        for count in range(1, DRAFTED + 1)
    }
    return {
        "text": {"config": GenerateConfig(deterministic=True, temp=0)},
        "prompt-lookup": {
            "config": GenerateConfig(decoding="speculative", drafter="prompt-lookup", temp=0)
        },
        **chains,
        "mtp and text": {"config": GenerateConfig(deterministic=True, temp=0), "drafter": head},
    }


def answer_by_all_systems(
    folder: Path, prompts: Sequence[list[int]], num_tokens: int
) -> tuple[StreamFusedModel, list[SystemAnswers]]:
    """Answer the prompts; only the length ends an answer."""
    model, tokenizer = ssmlx.load(folder, dtype="float32")
    tokenizer.eos_token_ids = set()
    plain = GenerateConfig(decoding="plain", max_tokens=num_tokens, temp=0)
    given = {
        MLX_LM: [
            answer_with_mlx_lm(model.backbone.model, tokenizer, one, plain) for one in prompts
        ],
        PLAIN: [answer_with_ssmlx(model, tokenizer, one, plain) for one in prompts],
    }
    for name, how in make_drafting_systems(folder, model).items():
        settings = {**how, "max_tokens": num_tokens}
        given[name] = [answer_with_ssmlx(model, tokenizer, one, **settings) for one in prompts]
    expected = [answer.tokens for answer in given[PLAIN]]
    return model, [
        SystemAnswers(
            name,
            answers,
            sum(one.tokens == tokens for one, tokens in zip(answers, expected, strict=True)),
        )
        for name, answers in given.items()
    ]


def replay_drafts_in_torch(folder: Path, texts: Sequence[Text]) -> dict[str, Any]:
    """Shares of chains accepted to each level, and tokens per call without the prompts'."""
    model, head = load_torch_model(folder)
    accepted = []  # drafted tokens accepted after each token of each answer
    for prompt, answer in texts:
        text = torch.tensor([[*prompt, *answer]])
        with torch.no_grad():
            hidden = model.model(text, use_cache=False).last_hidden_state
            drafted = draft_chains(model, head, text, hidden, DRAFTED)
        accepted.append(count_accepted(text[0].tolist(), drafted, len(prompt)))
    chains = [count for one in accepted for count in one]
    levels = range(1, DRAFTED + 1)
    return {
        "levels": [sum(count >= level for count in chains) / len(chains) for level in levels],
        "tokens_per_call": [replayed_tokens_per_call(accepted, level) for level in levels],
    }


def count_accepted(
    text: Sequence[int],  # prompt and answer
    drafted: torch.Tensor,  # [R, K] chains; chain i follows token i + 1
    start: int,  # tokens of the prompt: the first root is the answer's first token
) -> list[int]:
    """Count accepted tokens for each root whose whole chain fits into the text."""
    counts = []
    for root in range(start, len(text) - drafted.shape[1]):
        chain = drafted[root - 1].tolist()
        right = [one == wanted for one, wanted in zip(chain, text[root + 1 :], strict=False)]
        counts.append((*right, False).index(False))
    return counts


def replayed_tokens_per_call(
    # by answer, of `count_accepted`
    accepted: Sequence[Sequence[int]],
    drafted: int,  # tokens of a call's chain
) -> float:
    """Tokens per call, without the prompts' calls."""
    tokens = calls = 0
    for counts in accepted:
        place = 0
        while place < len(counts):
            step = 1 + min(counts[place], drafted)
            place += step
            tokens += step
            calls += 1
    return tokens / calls


def time_calls_after_chains(model: StreamFusedModel, texts: Sequence[Text]) -> dict[str, Any]:
    """Time a plain call after a chain, by how many of its drafted tokens were accepted.

    That call takes back what was rejected: recurrences run again over the accepted rows. In half of
    the turns this alone is computed and timed first. Times are divided by those of the next plain
    call, so that what else the machine does affects both; "plain_seconds" is in seconds.
    """
    turns = [(kept, is_alone) for is_alone in (False, True) for kept in range(DRAFTED + 1)]
    found: dict[tuple[int, bool], list[float]] = {turn: [] for turn in turns}
    plain: list[float] = []
    chains: list[float] = []
    order = cycle(turns)
    for prompt, answer in texts:
        text = [*prompt, *answer]
        cache = model.make_cache()
        prefill(model, prompt[:-1], cache)
        while cache.offset + DRAFTED + 4 <= len(text):
            kept, is_alone = turn = next(order)
            chain = _time_one_chain_call(model, cache, text, kept)
            alone = _time_taking_back_alone(cache) if is_alone else 0.0
            behind = _time_one_plain_call(model, cache, text)
            plain.append(_time_one_plain_call(model, cache, text))
            chains.append(chain / plain[-1])
            found[turn].append((alone if is_alone else behind) / plain[-1])
    require(
        all(found.values()),
        f"answers of {sum(len(answer) for _, answer in texts)} tokens in all",
        expected="enough for two chains of each kind",
        do="raise --count or --max-tokens",
    )
    return {
        "plain_seconds": median(plain),
        "chain": median(chains),
        "behind": [median(found[kept, False]) for kept in range(DRAFTED + 1)],
        "alone": [median(found[kept, True]) for kept in range(DRAFTED + 1)],
        "calls": len(plain),
    }


def _time_taking_back_alone(cache: Any) -> float:
    started = time.perf_counter()
    cache.mark()  # rolls back what was rejected
    mx.eval(cache.state)
    seconds = time.perf_counter() - started
    cache.forget_marks()
    return seconds


def _time_one_chain_call(
    model: StreamFusedModel,
    cache: Any,
    text: Sequence[int],  # goes on after what is cached
    kept: int,  # number of correct tokens among the chain's `DRAFTED`
) -> float:
    """Time the calls; the accepted rows, `kept` + 1, are added to the cache."""
    root = cache.offset
    size = model.backbone.vocab_size
    known = text[root : root + 1 + DRAFTED]
    wrong = [(token + 1) % size for token in known[kept + 1 :]]
    tree = chain_tree(mx.array([*known[: kept + 1], *wrong], mx.int32))
    started = time.perf_counter()
    call = verify(model, tree, cache)
    count = len(call.read_tokens())
    mx.eval(cache.state)
    seconds = time.perf_counter() - started
    cache.commit_accepted(count)
    return seconds


def _time_one_plain_call(model: StreamFusedModel, cache: Any, text: Sequence[int]) -> float:
    """Time a call on the text's next token, which is then cached."""
    token = mx.array([text[cache.offset]], mx.int32)
    started = time.perf_counter()
    plain_call(model, token, last_tokens((), 0), cache).read_tokens()
    mx.eval(cache.state)
    return time.perf_counter() - started


def count_bytes_to_go_back(
    config: Mapping[str, Any],  # of a Qwen3.5 text model
    chain_rows: int,
    activation_bytes: int,  # of a number
) -> dict[str, int]:
    """Bytes that recurrences need to run again over the rows of a chain, in all layers.

    "states", in float32, are counted once, though they are read and written; "inputs" are those of
    recurrences and convolutions.
    """
    heads, keys = config["linear_num_value_heads"], config["linear_num_key_heads"]
    key_width, value_width = config["linear_key_head_dim"], config["linear_value_head_dim"]
    layers = config["layer_types"].count("linear_attention")
    channels = 2 * keys * key_width + heads * value_width
    window = config["linear_conv_kernel_dim"] - 1
    return {
        "states": layers * heads * key_width * value_width * 4,
        "inputs": layers
        * activation_bytes
        * (chain_rows * (channels + 2 * heads) + (chain_rows + window) * channels),
    }


def count_weight_bytes_of_a_call(
    config: Qwen3_5TextConfig,
    bits_per_weight: float,  # scales included
) -> int:
    """Bytes of all weights but the table of embeddings."""
    with torch.device("meta"):
        model = Qwen3_5ForCausalLM(config)
    numbers = sum(one.numel() for one in model.model.layers.parameters())
    numbers += model.lm_head.weight.numel()
    return int(numbers * bits_per_weight / 8)


def byte_rows(config: Qwen3_5TextConfig) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "weights": count_weight_bytes_of_a_call(one, bits),
            **count_bytes_to_go_back(one.to_dict(), 1 + DRAFTED, size),
        }
        for name, one, bits, size in (
            ("this model, float32", config, 32, 4),
            ("sizes of Qwen3.5-9B, 4 bits", Qwen3_5TextConfig(), 4.5, 2),
        )
    ]


def _percentages(shares: Sequence[float]) -> str:
    return ", ".join(f"{share:.0%}" for share in shares) or "-"


ANSWER_COLUMNS: Columns = {
    "system": lambda row: f"`{row['system']}`",
    "tokens per call": lambda row: f"{row['tokens_per_call']:.2f}",
    "target calls": lambda row: f"{row['calls']:,}",
    "accepted, by level": lambda row: _percentages(row["levels"]),
    "same tokens as plain": lambda row: f"{row['same_as_plain']} of {row['answers']}",
}
BYTE_COLUMNS: Columns = {
    "model": lambda row: row["name"],
    "weights that a call reads, MB": lambda row: f"{row['weights'] / 1e6:,.1f}",
    "states, MB": lambda row: f"{row['states'] / 1e6:,.2f}",
    "recorded inputs of 5 rows, MB": lambda row: f"{row['inputs'] / 1e6:,.2f}",
    "states read and written, and inputs, over weights": lambda row: (
        f"{(2 * row['states'] + row['inputs']) / row['weights']:.1%}"
    ),
}


def format_markdown_report(result: Mapping[str, Any]) -> str:
    return "\n\n".join(_report_parts(result))


def _report_parts(result: Mapping[str, Any]) -> Iterator[str]:
    yield f"Logits differ from those of transformers by {result['difference']:.1e} of the largest"
    yield markdown_table(ANSWER_COLUMNS, result["systems"])
    replay = result["replay"]
    per_call = ", ".join(f"{one:.2f}" for one in replay["tokens_per_call"])
    yield (
        f"The head by PyTorch's replay: accepted up to level {_percentages(replay['levels'])}; "
        f"tokens per call with chains of 1 to {DRAFTED} tokens {per_call}"
    )
    times = result["times"]
    behind, alone = (", ".join(f"{one:.2f}" for one in times[key]) for key in ("behind", "alone"))
    yield (
        f"A plain call takes {1000 * times['plain_seconds']:.2f} ms (median of {times['calls']}). "
        f"In plain calls, medians: a call on a chain of {1 + DRAFTED} rows {times['chain']:.2f}; a "
        f"plain call after a chain of which 0 to {DRAFTED} drafted tokens were accepted {behind}; "
        f"taking back the others alone {alone}"
    )
    yield markdown_table(BYTE_COLUMNS, result["bytes"])


def measure(
    folder: Path,
    data: Path,
    documents: Path,
    out: Path,
    *,
    count: int,
    prompt_tokens: int,
    max_tokens: int,
) -> int:
    """Measure with one PyTorch thread; exit code 1 if an answer is not plain decoding's."""
    torch.set_num_threads(1)
    make_folder(out)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    sources = read_sources(data, documents)
    prompts = cut_held_out_prompts(tokenizer, sources, count, prompt_tokens)
    model, answers = answer_by_all_systems(folder, prompts, max_tokens)
    plain = next(one for one in answers if one.system == PLAIN)
    texts = [Text(one, answer.tokens) for one, answer in zip(prompts, plain.answers, strict=True)]
    result = {
        "difference": relative_logit_gap_to_transformers(folder, prompts[0]),
        "systems": [one.row() for one in answers],
        "replay": replay_drafts_in_torch(folder, texts),
        "times": time_calls_after_chains(model, texts),
        "bytes": byte_rows(load_torch_model(folder)[0].config),
    }
    print_and_save(result, out / "hybrid", format_markdown_report(result))
    return 0 if all(one.same_as_plain == len(prompts) for one in answers) else 1
