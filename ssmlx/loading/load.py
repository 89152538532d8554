"""From a model's name to the pieces that decode: weights, tokenizer, adapter."""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm import utils
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..bars import Progress
from ..errors import InputError, check_choice, first_line, quoted, require
from ..formats.families import message_end_ids
from ..json_files import read_json
from ..mlx_thread import claim_process
from ..model import opt
from ..model.backbone import Backbone, FileStamp, Origin
from ..model.lm_head import PACKED_KINDS
from ..model.ranks import Group, shard_over_ranks
from ..model.rope import rope_settings
from ..model.streams import StreamFusedModel
from ..settings import DEFAULT_MODEL, DRAFT_HEADS, DTYPES, MAX_LAYERS, MAX_SIZE
from .adapter import load_adapter
from .attach import attach_adapter, swap_adapter
from .folders import CONFIG_FILE, Fetch
from .generation_config import read_model_sampling
from .head_tensors import may_have_drafting_heads, without_drafting_heads
from .identity import require_unchanged, stamp_model_files
from .names import AUTO_ADAPTER, resolve_adapter, resolve_model
from .stored_types import refuse_other_types, require_known_packing
from .tokenizer_files import require_no_code, tokenizer_arguments

OWN_FAMILIES = {"opt": opt}
"""Families that mlx-lm lacks, by `model_type`: each a module with `Model` and `ModelArgs`, as
mlx-lm's own are."""

ModelClasses = Callable[[dict[str, Any]], tuple[Any, Any]]
"""From the content of config.json to the class of the model and that of its arguments."""

_MOST = {
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layers", "n_layer"), MAX_LAYERS),
    **dict.fromkeys(("hidden_size", "vocab_size", "num_attention_heads", "head_dim"), MAX_SIZE),
    "max_position_embeddings": 2**31,
}
_WHOLE = "a whole model folder that mlx-lm can load"
_AGAIN = "download or convert it again"


def resolve_dtype(name: str) -> str:
    """Return `name`, or where it is "auto" what that means here: "stored" on a GPU, "float32" on
    the CPU.

    MLX's CPU backend runs quantised and 16-bit weights slowly, row by row; Metal and CUDA do not.

    Raises:
        InputError: the name is none of `DTYPES`.
    """
    check_choice("--dtype", name, DTYPES)
    if name != "auto":
        return name
    return "stored" if mx.default_device() == mx.gpu else "float32"


def resolve_draft_bits(name: str) -> int | None:
    """Return 8 where the draft head's weights are to be packed in 8 bits, else None: they stay as
    stored.

    "auto" packs them on a GPU, where a call of few rows takes as long as its weights take to read.
    MLX's CPU backend multiplies packed weights slowly.

    Args:
        name: one of `DRAFT_HEADS`.

    Raises:
        InputError: it is none of these.
    """
    check_choice("draft_head", name, DRAFT_HEADS)
    is_packed = name == "8bit" or (name == "auto" and mx.default_device() == mx.gpu)
    return 8 if is_packed else None


def is_quantised(model: nn.Module) -> bool:
    """Whether some of a model's modules have packed weights."""
    return any(isinstance(module, PACKED_KINDS) for module in model.modules())


def unpack_and_cast_model(model: nn.Module, dtype: str) -> nn.Module:
    """Return a model whose floating weights have `dtype`, with quantised weights unpacked.

    "stored" changes nothing. For other types the model given is changed, and may be the one
    returned. What was stored is cast to float32 first, so that unpacking loses nothing.

    Args:
        model: mlx-lm's; its weights may be lazy.
        dtype: "stored", "float32", "float16" or "bfloat16"; not "auto".
    """
    if dtype == "stored":
        return model
    # Unpack in float32: scales multiplied in half precision would not be the stored weights.
    model.set_dtype(mx.float32)
    if is_quantised(model):
        model = utils.dequantize_model(model)
    model.set_dtype(getattr(mx, dtype))
    return model


def choose_model_classes(folder: Path, config: Mapping[str, Any]) -> ModelClasses:
    """Choose the function by which mlx-lm's loader finds the classes of a folder's model.

    For architectures that mlx-lm lacks and this package has, the classes are this package's. Else
    they are mlx-lm's; where the weights have drafting heads among them, its model leaves these out.
    Either refuses weights in types that it does not compute with.

    Args:
        folder: the model's.
        config: the content of its config.json.
    """
    file = OWN_FAMILIES.get(config.get("model_type", ""))
    has_heads = file is None and may_have_drafting_heads(folder)

    def find_classes(config: dict[str, Any]) -> tuple[Any, Any]:
        model, args = (file.Model, file.ModelArgs) if file else utils._get_classes(config)
        model = without_drafting_heads(model) if has_heads else model
        return refuse_other_types(model, folder), args

    return find_classes


@contextmanager
def refuse_unsafe_and_explain_errors(
    folder: Path,
    failure: str,
    *,
    expected: str,
    do: str,
    config: Mapping[str, Any] | None = None,
) -> Iterator[Mapping[str, Any]]:
    """Turn every error over a model folder in the block into an InputError, see `explain_errors`.

    Before the block, folders are refused whose config asks to run code of their own (`model_file`),
    or gives sizes that are no numbers or too large to build. `auto_map` is allowed, as it is never
    followed.

    Args:
        folder: the model's.
        failure: begins the message.
        expected: what the folder should be.
        do: what to do about it.
        config: the content of its config.json if that was read before; it is read if this is None
            or empty.

    Yields:
        The content of config.json; empty if there is no such file.

    Raises:
        InputError: the folder is refused, or the block fails.
    """
    path = folder / "config.json"
    with explain_errors(failure, expected=expected, do=do):
        if not config:
            config = read_json(path, "settings") if path.exists() else {}
        _require_safe(path, config)
        yield config


@contextmanager
def explain_errors(failure: str, *, expected: str, do: str) -> Iterator[None]:
    """Turn every error in the block into an InputError of one line.

    Any exception is turned, an InputError excepted, and SystemExit too, which one of mlx-lm's
    models raises; KeyboardInterrupt is not.

    Args:
        failure: begins the message.
        expected: what was expected in the place of what failed.
        do: what to do about it.

    Raises:
        InputError: the block fails.
    """
    try:
        yield
    except InputError:
        raise
    except (Exception, SystemExit) as error:  # libraries raise many kinds
        # mlx-lm's OLMo ends Python where a package of its own is missing.
        cause = error.__context__ if isinstance(error, SystemExit) else error
        found = f"{failure} ({first_line(cause or error)})"
        raise InputError(found, expected=expected, do=do) from error


def _require_safe(path: Path, settings: Mapping[str, Any]) -> None:
    """Raise InputError if a model's settings ask to run code, or have sizes out of bounds.

    Args:
        path: of the settings, for the message.
        settings: the JSON object.
    """
    require(
        not settings.get("model_file"),
        f"{path} asks to run code that came with the model (model_file)",
        expected="a class that mlx-lm has",
        do="choose another model; ssmlx never runs such code",
    )
    _require_sizes_in_bounds(path, settings)
    inner = settings.get("text_config")
    _require_sizes_in_bounds(path, inner if isinstance(inner, dict) else {})


def _require_sizes_in_bounds(path: Path, settings: Mapping[str, Any]) -> None:
    """Raise InputError where one of the sizes in a model's settings (layers, widths, heads,
    vocabulary, positions; see `_MOST`) is no number, or is below 1 or above its bound there.

    Sizes that are missing or null are fine.

    Args:
        path: of the settings, for the message.
        settings: the JSON object.
    """
    for name, most in _MOST.items():
        value: Any = settings.get(name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        what = f"{path} has {quoted(value)} for {name}"
        is_fine = is_number and 1 <= value <= most
        require(value is None or is_fine, what, expected=f"1 to {most}", do=_AGAIN)


def load_base(
    path: Path,
    dtype: str = "auto",
    draft_head: str = "stored",
    group: Group | None = None,
    origin: Origin | None = None,
) -> tuple[Backbone, dict[str, Any]]:
    """Load a model folder of mlx-lm's or Hugging Face's layout, without an adapter.

    Args:
        path: the folder.
        dtype: of the weights, one of `DTYPES`.
        draft_head: weights of the draft head, one of `DRAFT_HEADS`.
        group: processes that share the model; None, or one process, for no sharing.
        origin: the model's name, and what is known of fetching; the rest is set here.

    Returns:
        The backbone, its weights evaluated, and the folder's config.json. The backbone can read its
        modules again from the folder.

    Raises:
        InputError: the folder cannot be loaded, or a name is none of those listed.
    """
    draft_bits = resolve_draft_bits(draft_head)
    dtype = resolve_dtype(dtype)
    group = group if group is not None and group.size() > 1 else None
    failure = f"{path} cannot be loaded as a model"
    files = stamp_model_files(path)
    model, config = load_weights(path, dtype, failure, group=group)
    is_settled = stamp_model_files(path) == files
    origin = replace(
        origin or Origin(),
        folder=path,
        config=config,
        files=files if is_settled else None,
        dtype=dtype,
        sampling=read_model_sampling(path),
        reload=partial(reload_modules, path, files, dtype, group) if is_settled else None,
    )
    return Backbone(model, origin, draft_bits, group), config


def reload_modules(
    path: Path,
    files: tuple[FileStamp, ...],
    dtype: str,
    group: Group | None,
    module_paths: Collection[str],
) -> dict[str, nn.Module]:
    """Load some modules of a model folder again, by their paths in the model, as `load_base` loads
    them.

    Args:
        path: the folder.
        files: its stamps as it was loaded, see `stamp_model_files`.
        dtype: one of `DTYPES`.
        group: processes that share the model, of which this rank takes its part; None for none.
        module_paths: of the modules that are wanted.

    Returns:
        New modules, evaluated, by path.

    Raises:
        InputError: the folder cannot be loaded, or has other files now.
    """
    require_unchanged(path, files)
    model, _ = load_weights(path, dtype, f"{path} cannot be read again", module_paths, group)
    require_unchanged(path, files)
    modules = dict(model.named_modules())
    return {name: modules[name] for name in module_paths}


def load_weights(
    path: Path,
    dtype: str,
    failure: str,
    evaluated_modules: Collection[str] = ("",),
    group: Group | None = None,
) -> tuple[nn.Module, dict[str, Any]]:
    """Build the model of a folder with mlx-lm's loader, cast its weights, and evaluate some or all.

    Args:
        path: the folder.
        dtype: one of `DTYPES`.
        failure: begins the message where it cannot be loaded.
        evaluated_modules: paths of the modules whose weights are evaluated, and so read; others
            stay lazy. "" is the whole model.
        group: processes that share the model, of which this rank keeps its part; None for the
            whole.

    Returns:
        The model, and the folder's config.json.

    Raises:
        InputError: the folder cannot be loaded, or `dtype` is none of `DTYPES`.
    """
    claim_process()
    dtype = resolve_dtype(dtype)
    with refuse_unsafe_and_explain_errors(path, failure, expected=_WHOLE, do=_AGAIN) as settings:
        if not settings:  # there is no file, which this says, or an empty one
            read_json(path / "config.json", "a model's settings")
        require_no_code(path)  # before weights are read
        require_known_packing(path, settings)
        model, config = utils.load_model(
            path,
            lazy=True,
            model_config=rope_settings(settings),
            trust_remote_code=False,
            get_model_classes=choose_model_classes(path, settings),
        )
    model = unpack_and_cast_model(model, dtype)
    if group is not None:
        shard_over_ranks(model, group)
    modules = dict(model.named_modules())
    with explain_errors(failure, expected=_WHOLE, do=_AGAIN):
        mx.eval([modules[name].parameters() for name in evaluated_modules])
    return model, config


def load_tokenizer(path: Path, config: dict[str, Any]) -> TokenizerWrapper:
    """Load the tokenizer of a folder, by its own files, see `tokenizer_files`.

    Args:
        path: the folder.
        config: the model's config.json, whose "eos_token_id" are the end tokens; if it has none,
            the tokenizer's own are.

    Raises:
        InputError: there is none that can be loaded, or the end tokens are no ids.
    """
    with refuse_unsafe_and_explain_errors(
        path,
        f"{path} has no tokenizer that can be loaded",
        expected="tokenizer.json or tokenizer.model beside the weights",
        do="copy the tokenizer's files into the folder",
        config=config,
    ) as settings:
        ends = config.get("eos_token_id")
        every = ends if isinstance(ends, list) else [ends]
        what = f"{path} has {quoted(ends)} for eos_token_id"
        is_fine = ends is None or all(isinstance(end, int) for end in every)
        require(is_fine, what, expected="a token id, or a list of them", do=_AGAIN)
        arguments = tokenizer_arguments(path, settings)
        found = utils.load_tokenizer(path, arguments, eos_token_ids=ends)
        found.eos_token_ids = {*found.eos_token_ids, *message_end_ids(found)}
        return found


def load(
    model: str | Path = DEFAULT_MODEL,
    *,
    adapter: str | Path | None = None,
    dtype: str = "auto",
    merge_lora: bool = True,
    draft_head: str = "auto",
    group: Group | None = None,
    cache_dir: str | Path | None = None,
    offline: bool = False,
    progress: Progress | None = None,
) -> tuple[StreamFusedModel, TokenizerWrapper]:
    """Load a model that drafts for itself, and its tokenizer.

    Args:
        model: a folder, an alias or a Hub name; see `ssmlx.loading.names.resolve_model`.
        adapter: an adapter folder, the name of one that ships with the package
            (`ssmlx.bundled_adapters`) or lies on the Hub, or "none" for the base alone, of a fused
            folder too; see `ssmlx.loading.names.resolve_adapter`. LoRA or DoRA that mlx-lm or PEFT
            trained is one, too: it drafts what its text says again. "auto" is what a chat takes: an
            adapter that `ssmlx.adapt` made here from these very weights, or else a bundled one for
            chats that belongs to the model. By default (None) it is the base alone. With None and
            "auto" alike, a fused folder has its own streams.
        dtype: "stored", "float32", "float16", "bfloat16", or "auto": as stored on a GPU, float32 on
            the CPU backend. Quantised weights are unpacked for the float types.
        merge_lora: add LoRA that acts on every row into unquantised weights, which makes it free at
            run time; `swap_adapter` reads the original weights of these layers again. False keeps
            the LoRA apart.
        draft_head: the weights of the LM head's copy that drafts from a draft vocabulary: "stored",
            as the head's own; "8bit", packed, a quarter of float32's memory, which may change a
            guess but no answer; or "auto": packed on a GPU.
        group: processes that share the model, such as `mx.distributed.init()` gives: each keeps its
            part of every layer, and all must do the same calls, one answer at a time.
        cache_dir: the folder to keep what is fetched in; by default ssmlx's cache folder for
            aliases, and the Hub's own for what lies there.
        offline: fetch nothing.
        progress: told (bytes so far, bytes in all) of a download, from any thread; what it raises
            stops the download.

    Returns:
        The model, its weights evaluated, and mlx-lm's tokenizer.

    Raises:
        InputError: something given is missing, broken, or does not fit the rest; or the model would
            have to be fetched, and cannot be.
    """
    fetch = Fetch(cache_dir=cache_dir, offline=offline, progress=progress)
    is_named = adapter not in (None, AUTO_ADAPTER)
    folder = resolve_adapter(adapter, fetch) if adapter is not None and is_named else None
    path = resolve_model(model, fetch)
    if not is_named and (path / CONFIG_FILE).exists():
        folder = path
    loaded = load_adapter(folder) if folder is not None else None
    origin = Origin(name=str(model), cache_dir=cache_dir, offline=offline)
    backbone, config = load_base(path, dtype, draft_head, group, origin)
    tokenizer = load_tokenizer(path, config)
    if loaded is None:
        base = StreamFusedModel(backbone)
        is_found = adapter == AUTO_ADAPTER
        found = swap_adapter(base, AUTO_ADAPTER, merge_lora=merge_lora) if is_found else base
        return found, tokenizer
    return attach_adapter(backbone, loaded, merge_lora=merge_lora), tokenizer
