"""Whether `ssmlx.calibrate` told the truth: some ways of decoding, timed on other prompts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..model.streams import StreamFusedModel
from ..settings import GenerateConfig, TreeConfig
from ..tuning.cost import DraftShape
from .choice import Candidate
from .costs import Bar, no_bar
from .steps import config_of
from .timing import Answer, in_turns, ssmlx_answer

PLAIN, CHOSEN = "plain", "chosen"
Answerer = Callable[[str, list[int]], Answer]


@dataclass(frozen=True)
class Checked:
    """One way of decoding, as expected and as measured; speeds are after the prompt's call.

    Attributes:
        name: "chosen", "plain", or what it is beside them.
        what: in words.
        expected, measured: tokens/s.
        expected_per_call, per_call: tokens per call.
        expected_seconds, seconds: of a call.
        expected_speedup, speedup: over plain decoding.
        same_tokens: whether its answers are plain decoding's.
    """

    name: str
    what: str
    expected: float
    measured: float
    expected_per_call: float
    per_call: float
    expected_seconds: float
    seconds: float
    expected_speedup: float
    speedup: float
    same_tokens: bool

    @property
    def ratio(self) -> float:
        """Expected over measured tokens/s."""
        return self.expected / self.measured

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {**asdict(self), "ratio": self.ratio}


def to_check(chosen: Candidate, candidates: Sequence[Candidate]) -> dict[str, Candidate]:
    """The chosen way, and others that it should beat: the default, a small tree, and the other
    schedule, as far as they are others."""
    shape, streams = chosen.shape, max(one.shape.num_streams for one in candidates)
    schedule = "second-pass" if shape.stream_schedule == "fused" else "fused"
    wanted = {
        "default": DraftShape(tree=TreeConfig(), num_streams=streams),
        "small": DraftShape(tree=TreeConfig(size=4), num_streams=streams),
        "other schedule": replace(shape, stream_schedule=schedule),  # type: ignore[arg-type]
    }
    known = {one.shape: one for one in candidates}
    others = {
        name: known[one] for name, one in wanted.items() if one in known and one != chosen.shape
    }
    return {CHOSEN: chosen, **others}


def answer_all(
    answer: Answerer, names: Sequence[str], prompts: Sequence[list[int]], bar: Bar = no_bar
) -> dict[str, list[Answer]]:
    """Every system's answers, in turns, after one that does not count."""
    for name in names:
        answer(name, prompts[0])
    answers: dict[str, list[Answer]] = {name: [] for name in names}
    turns = list(in_turns(prompts, names))
    for prompt, name in bar(turns, "held-out answers"):
        answers[name].append(answer(name, prompt))
    return answers


def check(
    model: StreamFusedModel,
    tokenizer: TokenizerWrapper,
    prompts: Sequence[list[int]],
    chosen: Candidate,
    candidates: Sequence[Candidate],
    *,
    max_tokens: int,
    bar: Bar = no_bar,
) -> list[Checked]:
    """Decode `prompts` in several ways, and set what was expected beside what came."""
    ways = to_check(chosen, candidates)
    configs = {name: config_of(one.shape, max_tokens=max_tokens) for name, one in ways.items()}
    configs[PLAIN] = GenerateConfig(decoding="plain", max_tokens=max_tokens)

    def answer(name: str, prompt: list[int]) -> Answer:
        return ssmlx_answer(model, tokenizer, prompt, configs[name])

    return compare(ways, answer_all(answer, list(configs), prompts, bar))


def compare(
    ways: Mapping[str, Candidate], answers: Mapping[str, Sequence[Answer]]
) -> list[Checked]:
    """Expected beside measured, of each way in `ways` and of plain decoding.

    Empty where a way has nothing to time: every answer is a single token.
    """
    if not all(_calls(own) and _seconds(own) for own in answers.values()):
        return []
    plain_seconds = ways[CHOSEN].plain_seconds
    plain_speed, tokens = _speed(answers[PLAIN]), [one.tokens for one in answers[PLAIN]]
    found = []
    for name, own in answers.items():
        calls, speed, way = _calls(own), _speed(own), ways.get(name)
        per_call = way.tokens_per_call if way else 1.0
        call_seconds = way.step_seconds if way else plain_seconds
        found.append(
            Checked(
                name=name,
                what=way.shape.text() if way else "plain decoding",
                expected=per_call / call_seconds,
                measured=speed,
                expected_per_call=per_call,
                per_call=_tokens(own) / calls,
                expected_seconds=call_seconds,
                seconds=_seconds(own) / calls,
                expected_speedup=per_call / call_seconds * plain_seconds,
                speedup=speed / plain_speed,
                same_tokens=[one.tokens for one in own] == tokens,
            )
        )
    return found


def _tokens(answers: Sequence[Answer]) -> int:
    """After each answer's first, which comes with the prompt's call."""
    return sum(len(one.tokens) - 1 for one in answers)


def _calls(answers: Sequence[Answer]) -> int:
    return sum(one.target_calls - 1 for one in answers)


def _seconds(answers: Sequence[Answer]) -> float:
    return sum(one.decode_seconds for one in answers)


def _speed(answers: Sequence[Answer]) -> float:
    return _tokens(answers) / _seconds(answers)
