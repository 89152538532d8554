"""What a folder's files say of its tokenizer beyond what `AutoTokenizer` reads by itself.

`AutoTokenizer` goes by the model's settings to the tokenizer's class, and refuses a tokenizer for
what it finds wrong with these: rope scaling of a class that it lacks, layers of another number. So
it is given settings that hold the model's type and nothing else of the model. It refuses one that
came with code (`auto_map`), even if it need not be run: tokenizer.json says all. And it knows
nothing of the templates that `AutoProcessor` reads for models that also see.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto.tokenization_auto import (
    TOKENIZER_MAPPING_NAMES,
    tokenizer_class_from_name,
)

from ..errors import quoted, require
from ..json_files import read_json, read_text

DEFAULT = "default"
JINJA_FILE = "chat_template.jinja"
NAMED_JINJA_FILES = "additional_chat_templates/*.jinja"
_SETTINGS = "tokenizer_config.json"
JSON_FILES = (_SETTINGS, "chat_template.json", "processor_config.json")
"""Files of settings that a chat template may stand in; the first of them that has one counts."""
_TEMPLATE = "a chat template: a text, or texts by name"
_WHOLE = "tokenizer.json"
_OTHERS = ("tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")
"""Files that transformers may read as well, if it has a class for the model. Not so tiktoken's,
which do not say how a text is cut into words."""
_BACKEND = "TokenizersBackend"
"""transformers' class of tokenizers that are what tokenizer.json says, and nothing more."""
_TYPE_OF_BACKEND = next(name for name, one in TOKENIZER_MAPPING_NAMES.items() if one == _BACKEND)


def tokenizer_arguments(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `AutoTokenizer.from_pretrained` for a folder.

    Args:
        folder: of the model.
        config: the content of its config.json.

    Raises:
        InputError: a file cannot be read, its chat template is invalid, or only code that came with
            the model can make the tokenizer.
    """
    require_no_code(folder)
    template = read_chat_template(folder)
    has_spare_code = _names_code(folder) and (folder / _WHOLE).is_file()
    return {
        "trust_remote_code": False,
        "config": _settings_without_model(config),
        **({"tokenizer_type": _TYPE_OF_BACKEND} if has_spare_code else {}),
        **({} if template is None else {"chat_template": template}),
    }


def require_no_code(folder: Path) -> None:
    """Raise InputError if code that came with a model is named for its tokenizer, and is needed: no
    file is there that another class might read.

    Args:
        folder: of the model.
    """
    require(
        not _names_code(folder) or any((folder / one).is_file() for one in (_WHOLE, *_OTHERS)),
        f"{folder / _SETTINGS} asks to run code that came with the model (auto_map)",
        expected=f"{_WHOLE} beside it, as such code is never run",
        do="take the model from somebody who has that file",
    )


def _names_code(folder: Path) -> bool:
    path = folder / _SETTINGS
    named = read_json(path, "settings").get("auto_map") if path.is_file() else None
    return bool(named.get("AutoTokenizer") if isinstance(named, dict) else named)


def _settings_without_model(config: Mapping[str, Any]) -> PreTrainedConfig:
    """Return settings of the model's class in transformers that hold what a tokenizer's class is
    chosen by, and nothing that transformers checks.
    """
    model_type = config.get("model_type") or ""
    is_known = model_type in CONFIG_MAPPING
    kind = CONFIG_MAPPING[model_type] if is_known else PreTrainedConfig
    settings = kind.__new__(kind)  # its __init__ would make a model's settings, and check them
    settings.model_type = model_type
    settings.model_name = config.get("model_name")
    name = config.get("tokenizer_class")
    is_unknown = isinstance(name, str) and tokenizer_class_from_name(name) is None
    # Of an unknown class in tokenizer_config.json, transformers makes this one by itself.
    settings.tokenizer_class = _BACKEND if is_unknown else name
    return settings


def read_chat_template(folder: Path) -> str | dict[str, str] | None:
    """Read a folder's chat template from the first file that has one.

    `chat_template.jinja` goes first, as in transformers' tokenizers; then the "chat_template" of
    tokenizer_config.json; then, for a model that also sees, that of chat_template.json and of
    processor_config.json, as in transformers' processors. Templates of other names, such as
    `tool_use`, stand in `additional_chat_templates/NAME.jinja` or beside the default one.

    Returns:
        The text; texts by name if there are several, or if the only one is not for chats, such as
        "rag"; None if there are none.

    Raises:
        InputError: a file cannot be read, or its template is invalid.
    """
    found: dict[str, str] = {}
    for path in sorted([folder / JINJA_FILE, *folder.glob(NAMED_JINJA_FILES)]):
        if path.is_file():
            name = DEFAULT if path.name == JINJA_FILE else path.stem
            found[name] = read_text(path, expected=_TEMPLATE, do="copy it again")
    for path in (folder / name for name in JSON_FILES):
        if DEFAULT not in found and path.is_file():
            found = {**_templates_by_name(path), **found}
    for_chats = [found[name] for name in (DEFAULT, "tool_use") if name in found]
    return for_chats[0] if len(found) == len(for_chats) == 1 else found or None


def _templates_by_name(path: Path) -> dict[str, str]:
    """Return the "chat_template" of a file of settings by name; empty where it has none.

    Raises:
        InputError: the file cannot be read, or what it has is no template.
    """
    value = read_json(path, "settings").get("chat_template")
    if value is None:
        return {}
    if isinstance(value, str):
        return {DEFAULT: value}
    if isinstance(value, list) and all(isinstance(one, dict) for one in value):
        value = {one.get("name"): one.get("template") for one in value}
    parts = [one for pair in value.items() for one in pair] if isinstance(value, dict) else [None]
    require(
        all(isinstance(one, str) for one in parts),
        f"{path} has {quoted(value)} for chat_template",
        expected=_TEMPLATE,
        do="copy it again",
    )
    found: dict[str, str] = value
    return found
