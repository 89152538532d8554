"""A model's config.json: read, and refused if it asks to run code or for sizes out of bounds."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import InputError, first_line, quoted, require
from ..json_files import read_json
from ..settings import MAX_LAYERS, MAX_SIZE, Allowed

_LAYERS = Allowed(least=1, most=MAX_LAYERS)
_SIZE = Allowed(least=1, most=MAX_SIZE)
_SIZES = {
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layers", "n_layer"), _LAYERS),
    **dict.fromkeys(("hidden_size", "vocab_size", "num_attention_heads", "head_dim"), _SIZE),
    "max_position_embeddings": Allowed(least=1, most=2**31),
}


@contextmanager
def open_config(
    folder: Path,
    failure: str,  # begins the message
    *,
    expected: str,
    do: str,
    config: Mapping[str, Any] | None = None,  # config.json, if it was read before
) -> Iterator[Mapping[str, Any]]:
    """Yield a folder's config.json; turn every error over the folder into one line.

    Configs that ask to run code (`model_file`) or have sizes too large to build are refused first.
    `auto_map` is allowed, as it is never followed.
    """
    path = folder / "config.json"
    with explain_errors(failure, expected=expected, do=do):
        if not config:
            config = read_json(path, "settings") if path.exists() else {}
        _require_safe(path, config)
        yield config


@contextmanager
def explain_errors(
    failure: str,  # begins the message
    *,
    expected: str,
    do: str,
) -> Iterator[None]:
    """Turn every error in the block into an InputError of one line, without transformers' warnings
    beside it."""
    try:
        with _held_back(logging.getLogger("transformers")):
            yield
    except InputError:
        raise
    except (Exception, SystemExit) as error:  # libraries raise many kinds
        # mlx-lm's OLMo ends Python if a package that it needs is missing.
        cause = error.__context__ if isinstance(error, SystemExit) else error
        found = f"{failure} ({first_line(cause or error)})"
        raise InputError(found, expected=expected, do=do) from error


@contextmanager
def _held_back(logger: logging.Logger) -> Iterator[None]:
    """Log what a library logs in the block after its end, and nothing of it if the block fails."""
    kept: list[logging.LogRecord] = []
    handlers = [*logger.handlers]

    def hold(record: logging.LogRecord) -> bool:
        kept.append(record)
        return False

    for handler in handlers:
        handler.addFilter(hold)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(hold)
    for record in dict.fromkeys(kept):
        logger.handle(record)


def _require_safe(
    path: Path,  # for messages
    settings: Mapping[str, Any],
) -> None:
    require(
        not settings.get("model_file"),
        f"{path} asks to run code that came with the model (model_file)",
        expected="a class that mlx-lm has",
        do="choose another model; ssmlx never runs such code",
    )
    _require_sizes_in_bounds(path, settings)
    inner = settings.get("text_config")
    _require_sizes_in_bounds(path, inner if isinstance(inner, dict) else {})


def _require_sizes_in_bounds(
    path: Path,  # for messages
    settings: Mapping[str, Any],
) -> None:
    """Refuse sizes out of bounds before mlx-lm allocates by them; a missing or null size is left to
    mlx-lm."""
    for name, allowed in _SIZES.items():
        value: Any = settings.get(name)
        require(
            value is None or allowed.holds(value),
            f"{path} has {quoted(value)} for {name}",
            expected=allowed.in_words(),
            do="download or convert it again",
        )
