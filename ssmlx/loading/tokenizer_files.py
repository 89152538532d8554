"""What a folder's files say of its tokenizer beyond what `AutoTokenizer` reads by itself."""

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
# Settings that may hold a chat template; the first file that has one counts.
JSON_FILES = (_SETTINGS, "chat_template.json", "processor_config.json")
_TEMPLATE = "a chat template: a text, or texts by name"
_WHOLE = "tokenizer.json"
# Files that transformers may also read, if it has a class for the model. tiktoken's are not among
# them, as they do not say how a text is split into words.
_OTHERS = ("tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")
# transformers' class of tokenizers that are what tokenizer.json says, and nothing more.
_BACKEND = "TokenizersBackend"
_TYPE_OF_BACKEND = next(name for name, one in TOKENIZER_MAPPING_NAMES.items() if one == _BACKEND)


def tokenizer_arguments(
    folder: Path,
    config: Mapping[str, Any],  # the content of config.json
) -> dict[str, Any]:
    """Arguments of `AutoTokenizer.from_pretrained`."""
    # `AutoTokenizer` refuses a tokenizer for what it finds wrong with the model's settings (rope
    # scaling of a class that it lacks, for example), so it gets none of them. It refuses one that
    # came with code (`auto_map`) even if tokenizer.json makes the code unnecessary. And it does not
    # read the templates that `AutoProcessor` reads for models that also see.
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
    """Refuse a tokenizer that only code which came with the model can read."""
    require(
        not _names_code(folder) or any((folder / one).is_file() for one in (_WHOLE, *_OTHERS)),
        f"{folder / _SETTINGS} asks to run code that came with the model (auto_map)",
        expected=f"{_WHOLE} beside it, as such code is never run",
        do="use a copy of the model that has that file",
    )


def _names_code(folder: Path) -> bool:
    path = folder / _SETTINGS
    named = read_json(path, "settings").get("auto_map") if path.is_file() else None
    return bool(named.get("AutoTokenizer") if isinstance(named, dict) else named)


def _settings_without_model(config: Mapping[str, Any]) -> PreTrainedConfig:
    """The settings by which a tokenizer's class is chosen, without what transformers would
    check."""
    model_type = config.get("model_type") or ""
    is_known = model_type in CONFIG_MAPPING
    kind = CONFIG_MAPPING[model_type] if is_known else PreTrainedConfig
    settings = kind.__new__(kind)  # its __init__ would make and check a model's settings
    settings.model_type = model_type
    settings.model_name = config.get("model_name")
    name = config.get("tokenizer_class")
    is_unknown = isinstance(name, str) and tokenizer_class_from_name(name) is None
    # transformers itself uses `_BACKEND` for an unknown class in tokenizer_config.json.
    settings.tokenizer_class = _BACKEND if is_unknown else name
    return settings


def read_chat_template(folder: Path) -> str | dict[str, str] | None:
    """A folder's chat template; several, or one that is not for chats, by their names."""
    # The order of transformers' tokenizers, then of its processors.
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
