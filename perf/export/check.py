"""`python -m perf.export.check`: does an exported model write what plain decoding writes?

Answers prompts with exported folders: Core AI's runtime runs on Linux too, Core ML on a Mac alone
(without one, the project's tests execute its packages in numpy). The tokens are compared with
MLX's plain decoding, the target calls with MLX's streaming on the same tree. In float32 all must
be equal, or the exit code is 1; calls may differ where two nodes of a draft were equally likely
but for rounding. In float16, and with compressed weights, the share of equal answers is told, and
by how little the first different token won.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ssmlx import exported
from ssmlx.api import GenerationResponse, stream_generate
from ssmlx.commands.options import make_parser, run
from ssmlx.errors import InputError
from ssmlx.exported.backends import DECODE, Arrays, Backend
from ssmlx.exported.manifest import REPORT
from ssmlx.exported.tree import TreeTables, node_scores
from ssmlx.loading.load import load
from ssmlx.model.shapes import to_float
from ssmlx.model.streams import StreamFusedModel
from ssmlx.prompts import Prompt, read_prompts
from ssmlx.settings import GenerateConfig, PruneConfig, TreeConfig

from ..run.results import save
from ..run.tasks import SQL

PROG = "perf.export.check"
TIE = 1e-4
"""Nodes that differ by less count as equally likely (log probability). On SmolLM2-135M the log
probabilities of two runtimes differed by up to 6e-5 in float32."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One answer.

    Attributes:
        tokens: ids, the end token included.
        target_calls: decode calls, the prompt's counted as one.
        advances: tokens that each of them advanced by.
        seconds: for all of it.
    """

    tokens: tuple[int, ...]
    target_calls: int
    advances: tuple[int, ...] = ()
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Row:
    """What one exported folder came to.

    Attributes:
        name: of the folder.
        backend: what ran it.
        profile, precision, compression: of the export.
        megabytes: size of the package.
        weight_error: relative RMS against float32; None where it was not measured.
        prompts: how many.
        same_tokens: answers equal to plain decoding's, token for token.
        same_calls: of these, answers in as many target calls as MLX's streaming took.
        tokens_per_call: of the exported model.
        mlx_tokens_per_call: of MLX with the same tree.
        largest_gap: over answers that part, the most by which MLX's logit of its own token beat
            that of the exported model's, where they part; None where none does.
        tree_margin: over answers of the same tokens in another number of calls, the most by which
            the last node of the tree that made the difference beat the first one left out (log
            probability, float32 alone); None where there are none.
        seconds_per_call: of the check, which says nothing of a Mac.
    """

    name: str
    backend: str
    profile: str
    precision: str
    compression: str
    megabytes: float
    weight_error: float | None
    prompts: int
    same_tokens: int
    same_calls: int
    tokens_per_call: float
    mlx_tokens_per_call: float
    largest_gap: float | None
    tree_margin: float | None
    seconds_per_call: float

    @property
    def is_exact(self) -> bool:
        """Whether nothing differs but what rounding decides."""
        tied = self.tree_margin is not None and self.tree_margin < TIE
        return self.same_tokens == self.prompts and (tied or self.same_calls == self.prompts)

    def __str__(self) -> str:
        error = "" if self.weight_error is None else f"{self.weight_error:.1e}"
        gap = "" if self.largest_gap is None else f"; parts where logits are {self.largest_gap:.3f}"
        if self.tree_margin is not None:
            gap += f"; calls part where nodes are {self.tree_margin:.1e}"
        return (
            f"{self.name:12} {self.backend:11} {self.profile:3} {self.precision:7} "
            f"{self.compression:10} {self.megabytes:6.1f} MB  weight error {error:8} "
            f"same tokens {self.same_tokens}/{self.prompts}, same calls {self.same_calls}, "
            f"{self.tokens_per_call:.2f} a call (MLX {self.mlx_tokens_per_call:.2f}){gap}"
        )


def load_exported(folder: Path) -> tuple[exported.ExportedModel, str]:
    """An exported model on this machine, and the name of what runs it."""
    model = exported.load(folder)
    return model, "Core AI" if model.manifest.target == "coreai" else "Core ML"


def mlx_config(manifest: exported.Manifest, max_tokens: int) -> GenerateConfig:
    """MLX's settings for the trees of an exported model."""
    tree, streams = manifest.tree, manifest.num_streams
    full = sum(tree.num_candidates**level for level in range(streams + 1)) == manifest.num_nodes
    pruned = manifest.num_kept < manifest.num_nodes
    return GenerateConfig(
        decoding="streaming",
        max_tokens=max_tokens,
        num_streams=streams,
        tree=TreeConfig(kind="full" if full else "best", width=tree.num_candidates, size=tree.size),
        prune=PruneConfig(kind="budget", keep=manifest.num_kept) if pruned else PruneConfig(),
    )


def mlx_answer(
    model: StreamFusedModel, tokenizer: Any, prompt: list[int], config: GenerateConfig
) -> Answer:
    """An answer by MLX."""
    started = time.perf_counter()
    responses = list(stream_generate(model, tokenizer, prompt, config))
    return _answer(responses, time.perf_counter() - started)


def _answer(responses: Sequence[GenerationResponse], seconds: float) -> Answer:
    return Answer(
        tokens=tuple(token for response in responses for token in response.tokens),
        target_calls=responses[-1].target_calls,
        advances=tuple(len(response.tokens) for response in responses),
        seconds=seconds,
    )


def exported_answer(model: exported.ExportedModel, prompt: list[int], max_tokens: int) -> Answer:
    """An answer by an exported model."""
    started = time.perf_counter()
    responses = list(exported.stream_generate(model, prompt, max_tokens=max_tokens))
    return _answer(responses, time.perf_counter() - started)


def gap(model: StreamFusedModel, prompt: list[int], mine: Answer, theirs: Answer) -> float:
    """By how much MLX's logit of its token beats that of `mine`, where the answers part."""
    pairs = zip(mine.tokens, theirs.tokens, strict=False)
    where = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if where is None:
        return 0.0  # one ends where the other goes on
    text = mx.array([*prompt, *theirs.tokens[:where]])
    logits = model.backbone.logits(model.backbone.append(text, model.make_cache())[:, -1:])[0]
    return to_float(logits[theirs.tokens[where]] - logits[mine.tokens[where]])


# An exported model may take another number of calls than MLX for the same tokens. Float32 sums of
# thirty layers differ in their last digits with the order of summation; where two nodes are all but
# equally likely and only one of them fits into the tree, that decides which.


class Recorder:
    """A backend that keeps the log probabilities of each draft.

    Args:
        backend: does the work.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.logprobs: list[np.ndarray] = []

    def make_state(self) -> Any:
        """See `Backend`."""
        return self._backend.make_state()

    def predict(self, function: str, inputs: Arrays, state: Any) -> Arrays:
        """See `Backend`."""
        found = self._backend.predict(function, inputs, state)
        if function == DECODE:
            self.logprobs.append(np.array(found["candidate_logprobs"]))
        return found


def margin(logprobs: np.ndarray, tables: TreeTables) -> float:
    """By how much the last node of a tree beats the first that is left out; inf where none is.

    Args:
        logprobs: [G, K] of each stream's candidates.
        tables: the nodes that there can be.
    """
    scores = np.sort(node_scores(logprobs, tables))[::-1]
    if len(scores) <= tables.size:
        return float("inf")
    return float(scores[tables.size - 1] - scores[tables.size])


def parting_call(mine: Sequence[int], theirs: Sequence[int]) -> int:
    """The first call that advances by another number of tokens.

    Args:
        mine: tokens that each call of one side advanced by.
        theirs: those of the other, of the same sum and another length.
    """
    return next(call for call, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b)


def deciding_margin(
    model: exported.ExportedModel, prompt: Sequence[int], call: int, max_tokens: int
) -> float:
    """`margin` of the tree that `call` verified, in an answer to `prompt`."""
    recorder = Recorder(model.backend)
    watched = replace(model, backend=recorder)
    answer = exported.stream_generate(watched, prompt, max_tokens=max_tokens)
    for _ in islice(answer, call):
        pass
    return margin(recorder.logprobs[call - 1], model.manifest.tree)


def check(
    folder: Path,
    mlx_model: tuple[StreamFusedModel, Any],
    prompts: Sequence[Prompt],
    max_tokens: int,
) -> Row:
    """Run one exported folder on `prompts` and compare."""
    from huggingface_hub.utils import tqdm

    package, backend = load_exported(folder)
    model, tokenizer = mlx_model
    manifest = package.manifest
    streaming = mlx_config(manifest, max_tokens)
    plain = GenerateConfig(decoding="plain", max_tokens=max_tokens)
    found, expected, gaps, margins = [], [], [], []
    for asked in tqdm(prompts, desc=f"{folder.name} by {backend}", disable=None):
        prompt = exported.prompt_tokens(package, asked)
        oracle = mlx_answer(model, tokenizer, prompt, plain)
        drafted = mlx_answer(model, tokenizer, prompt, streaming)
        expected.append(replace(oracle, target_calls=drafted.target_calls))
        found.append(exported_answer(package, prompt, max_tokens))
        if found[-1].tokens != oracle.tokens:
            gaps.append(gap(model, prompt, found[-1], oracle))
        elif found[-1].target_calls != drafted.target_calls and manifest.dtype == "float32":
            call = parting_call(found[-1].advances, drafted.advances)
            margins.append(deciding_margin(package, prompt, call, max_tokens))
    return _row(folder, backend, manifest, found, expected, (gaps, margins))


def _row(
    folder: Path,
    backend: str,
    manifest: exported.Manifest,
    found: Sequence[Answer],
    expected: Sequence[Answer],
    differences: tuple[Sequence[float], Sequence[float]],
) -> Row:
    gaps, margins = differences
    report = json.loads((folder / REPORT).read_text(encoding="utf-8"))
    pairs = list(zip(found, expected, strict=True))
    same = [(mine, theirs) for mine, theirs in pairs if mine.tokens == theirs.tokens]
    calls, mlx_calls = (sum(a.target_calls for a in side) for side in (found, expected))
    error = report["weight_error"]
    return Row(
        name=folder.name,
        backend=backend,
        profile=manifest.profile,
        precision=manifest.dtype,
        compression=manifest.compression,
        megabytes=round(report["package_bytes"] / 1e6, 1),
        weight_error=None if error is None else error["relative_rms"],
        prompts=len(found),
        same_tokens=len(same),
        same_calls=sum(mine.target_calls == theirs.target_calls for mine, theirs in same),
        tokens_per_call=round(sum(len(a.tokens) for a in found) / calls, 3),
        mlx_tokens_per_call=round(sum(len(a.tokens) for a in expected) / mlx_calls, 3),
        largest_gap=round(max(gaps), 4) if gaps else None,
        tree_margin=max(margins) if margins else None,
        seconds_per_call=round(sum(a.seconds for a in found) / calls, 3),
    )


def _main(args: argparse.Namespace) -> int:
    prompts = read_prompts(args.prompts)[: max(0, args.count)]
    if not prompts:
        raise InputError(f"--count {args.count}", expected="1 or more", do="give a larger number")
    mlx_model = load(args.model, adapter=args.adapter, dtype="float32")
    rows = []
    for folder in args.folders:
        rows.append(check(folder, mlx_model, prompts, args.max_tokens))
        print(rows[-1], flush=True)
        print("saved", save(args.name, {"rows": [asdict(row) for row in rows]}), file=sys.stderr)
    return 0 if all(row.is_exact for row in rows if row.precision == "float32") else 1


def add_source_options(parser: argparse.ArgumentParser) -> None:
    """What was exported, and what to ask it."""
    parser.add_argument(
        "--model", default="smollm2-135m-q4_1", help="that was exported (default: %(default)s)"
    )
    parser.add_argument("--adapter", default="sql", help="that was exported (default: %(default)s)")
    parser.add_argument(
        "--prompts", type=Path, default=SQL.test, metavar="FILE",
        help='objects with a "prompt"',
    )  # fmt: skip
    parser.add_argument("--count", type=int, default=20, help="prompts (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=64, help="(default: %(default)s)")


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """The command's options."""
    description, _, more = (__doc__ or "").partition("\n\n")
    parser = make_parser(PROG, description, more)
    parser.add_argument(
        "folders", type=Path, nargs="+", metavar="FOLDER", help="what `ssmlx.export` wrote"
    )
    add_source_options(parser)
    parser.add_argument(
        "--name", default="export-check", help="of the result's file (default: %(default)s)"
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Entry point: exit code 1 if a float32 export differs in anything."""
    args = parse_args(argv)
    return run(lambda: _main(args), PROG)


if __name__ == "__main__":
    raise SystemExit(main())
