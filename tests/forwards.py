"""Forward calls of a tiny Llama, as its first layer sees them: what a device has to do."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import NamedTuple
from weakref import WeakSet

from mlx_lm.models.llama import TransformerBlock
from tiny import FakeClock

import ssmlx
from ssmlx.generation import batching
from ssmlx.model.streams import StreamFusedModel


class Forward(NamedTuple):
    rows: int  # texts that share it
    tokens: (
        int  # of each: one in a plain call, more in a prompt's piece and where a draft is verified
    )


class Forwards(list[Forward]):
    """Forward calls since the list was last cleared, in order."""

    before: Callable[[Forward], object]  # called on the MLX thread; may raise

    def __init__(self) -> None:
        super().__init__()
        self.before = lambda forward: None

    @property
    def num_shared(self) -> int:
        return sum(one.rows > 1 for one in self)

    @property
    def calls(self) -> list[Forward]:
        """Those of one token each."""
        return [one for one in self if one.tokens == 1]

    @property
    def pieces(self) -> list[int]:
        """The tokens of the others: pieces of prompts, while nothing is drafted."""
        return [one.tokens for one in self if one.tokens > 1]


def watch_forwards(patch, model: StreamFusedModel) -> Forwards:
    """Watch the forward calls of a model, under any adapter."""
    norm = model.backbone.layers[0].input_layernorm.weight  # which adapters share
    real_call = TransformerBlock.__call__
    forwards = Forwards()

    def call(layer, hidden, *more, **named):
        if layer.input_layernorm.weight is norm:
            forwards.append(Forward(*hidden.shape[:2]))
            forwards.before(forwards[-1])
        return real_call(layer, hidden, *more, **named)

    patch.setattr(TransformerBlock, "__call__", call)
    return forwards


_tried: WeakSet[ssmlx.Engine] = WeakSet()


def watch_engine(patch, engine: ssmlx.Engine) -> Forwards:
    """Watch the forward calls of an engine's model, once it is known what the model can do."""
    if engine not in _tried:
        _try_shared_calls(engine)
    return watch_forwards(patch, engine.model("none"))


def _try_shared_calls(engine: ssmlx.Engine) -> None:
    """Have two answers open at once: what the model is tried for then is no answer's call."""
    _tried.add(engine)
    for adapter in engine.adapters:
        answers = [engine.stream([8], adapter=adapter, max_tokens=9) for _ in range(2)]
        for answer in (*answers, *answers):
            next(answer)
        for answer in answers:
            answer.close()
    engine.prompt_cache.close()


def let_forwards_take(patch, engine: ssmlx.Engine, seconds_of) -> tuple[Forwards, FakeClock]:
    """Watch them, and let each take so many seconds on the clock by which answers take turns.

    The calls are real; a look at the clock takes a little time, too.
    """
    forwards = watch_engine(patch, engine)
    clock = FakeClock(tick=0.001)
    forwards.before = lambda forward: clock.spend(seconds_of(forward))
    patch.setattr(batching, "time", SimpleNamespace(perf_counter=clock))
    return forwards, clock
