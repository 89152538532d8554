"""How a model's generation_config.json asks for its tokens to be sampled.

Temperature, top-p, top-k and min-p are followed, as vLLM follows them; penalties and all else that
the file may have are not.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import InputError, quoted, require
from ..json_files import read_json
from ..settings import ModelSampling

GENERATION_FILE = "generation_config.json"
_NAMES = {"temperature": "temp", "top_p": "top_p", "min_p": "min_p", "top_k": "top_k"}

logger = logging.getLogger("ssmlx")


def read_model_sampling(folder: Path) -> ModelSampling:
    """Read how a model's folder asks for tokens to be sampled: greedily where it says nothing.

    A file that cannot be read, or says nonsense, is logged and followed in nothing.

    Args:
        folder: of the model.
    """
    path = folder / GENERATION_FILE
    if not path.is_file():
        return ModelSampling()
    try:
        return sampling_asked_for(read_json(path, "a model's settings of generation"))
    except InputError as error:
        logger.warning("%s is not followed, decoding is greedy: %s", path, error)
        return ModelSampling()


def sampling_asked_for(values: Mapping[str, Any]) -> ModelSampling:
    """Return what the content of a generation_config.json asks for.

    It is greedy if `do_sample` is false, or missing beside no number of sampling. Else a missing
    temperature is 1, and a missing filter is off; null is as good as missing.

    Raises:
        InputError: a value is none that sampling may have.
    """
    given = {name: values[name] for name in _NAMES if values.get(name) is not None}
    samples = values.get("do_sample")
    require(
        samples is None or isinstance(samples, bool),
        f"do_sample is {quoted(samples)}",
        expected="true or false",
        do="correct it",
    )
    if samples is False or (samples is None and not given):
        return ModelSampling()
    if given.get("top_k") == -1:  # off, as some write it
        del given["top_k"]
    return ModelSampling(**{"temp": 1.0, **{_NAMES[name]: one for name, one in given.items()}})
