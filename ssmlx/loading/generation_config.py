"""How a model's generation_config.json asks for its tokens to be sampled.

Temperature, top-p, top-k, min-p and the repetition penalty are followed, as vLLM follows them;
nothing else in the file is.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import InputError, quoted
from ..json_files import read_json
from ..settings import ModelSampling

GENERATION_FILE = "generation_config.json"
_NAMES = {"temperature": "temp", "top_p": "top_p", "min_p": "min_p", "top_k": "top_k"}
_PENALTY = "repetition_penalty"

logger = logging.getLogger("ssmlx")


def read_model_sampling(folder: Path) -> ModelSampling:
    """The sampling that a model's folder asks for; greedy if its file says nothing or cannot be
    read."""
    path = folder / GENERATION_FILE
    if not path.is_file():
        return ModelSampling()
    try:
        return sampling_asked_for(read_json(path, "a model's generation settings"), str(path))
    except InputError as error:
        logger.warning("%s is ignored, so decoding is greedy: %s", path, error)
        return ModelSampling()


def sampling_asked_for(
    values: Mapping[str, Any],  # the content of generation_config.json
    source: str = GENERATION_FILE,  # the file, for logs
) -> ModelSampling:
    """The sampling that the file's content asks for.

    It is greedy if `do_sample` is false, or if there is no `do_sample`, temperature or filter.
    Otherwise a missing temperature is 1, and a missing filter or penalty is off. Null and invalid
    values count as missing.
    """
    found = {
        own: _valid_or_none(source, name, own, values.get(name)) for name, own in _NAMES.items()
    }
    given = {name: value for name, value in found.items() if value is not None}
    samples = values.get("do_sample")
    if not (samples is None or isinstance(samples, bool)):
        _warn(source, "do_sample", samples, "true or false")
        samples = None
    if samples is False or (samples is None and not given):
        return ModelSampling()
    penalty = _valid_or_none(source, _PENALTY, _PENALTY, values.get(_PENALTY))
    return ModelSampling(**{"temp": 1.0, _PENALTY: penalty or 1.0, **given})


def _valid_or_none(
    source: str,
    name: str,  # of the entry in the file
    own: str,  # its name in `ModelSampling`
    value: Any,
) -> Any:
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # 50.0 counts as 50
    if value is None or (name == "top_k" and value == -1):  # off, as some write it
        return None
    try:
        ModelSampling(**{own: value})
    except InputError as error:
        _warn(source, name, value, error.expected)
        return None
    return value


def _warn(source: str, name: str, value: Any, expected: str) -> None:
    logger.warning(
        "%s: %s is %s, which is ignored; expected %s", source, name, quoted(value), expected
    )
