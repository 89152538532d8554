"""One answer and what it took, for `guesses` and `ssmlx.adapt`."""

from dataclasses import dataclass

from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..api import stream_generate
from ..model.streams import StreamFusedModel
from ..settings import GenerateConfig


@dataclass(frozen=True)
class TimedAnswer:
    tokens: list[int]  # ids, the end token included
    target_calls: int  # forward passes, the prompt's counted as one
    seconds: float  # from the prompt to the last token


def ssmlx_answer(
    model: StreamFusedModel, tokenizer: TokenizerWrapper, prompt: list[int], config: GenerateConfig
) -> TimedAnswer:
    """Answer a prompt with ssmlx.

    Args:
        model: what answers, with streams where `config` drafts with them.
        tokenizer: the model's.
        prompt: token ids.
        config: how to decode.

    Returns:
        The whole answer, its target calls and its seconds.
    """
    segments = list(stream_generate(model, tokenizer, prompt, config))
    tokens = [token for one in segments for token in one.tokens]
    last = segments[-1]
    return TimedAnswer(tokens, last.target_calls, last.prefill_seconds + last.decode_seconds)
