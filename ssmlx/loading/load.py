"""From a model's name to the pieces that decode: weights, tokenizer, adapter."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm import utils
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..bars import Progress
from ..errors import InputError, check_choice, quoted, require
from ..formats.families import message_end_ids
from ..json_files import read_json
from ..mlx_thread import claim_process
from ..model import opt
from ..model.backbone import Backbone, FileStamp, Origin
from ..model.lm_head import PACKED_KINDS
from ..model.ranks import Group, shard_over_ranks
from ..model.rope import rope_settings
from ..model.streams import StreamFusedModel
from ..settings import DEFAULT_MODEL, DRAFT_HEADS, DTYPES
from .adapter import load_adapter
from .attach import swap_adapter
from .folders import CONFIG_FILE, Fetch
from .generation_config import read_model_sampling
from .identity import require_unchanged, stamp_model_files
from .model_config import explain_errors, open_config
from .names import AUTO_ADAPTER, resolve_adapter, resolve_model
from .stored_tensors import MEDUSA_PREFIX, is_head_name, is_mtp_name, tensor_names
from .stored_types import refuse_other_types, require_known_quantisation
from .tokenizer_files import require_no_code, tokenizer_arguments

# Families that mlx-lm lacks, by `model_type`: each a module with `Model` and `ModelArgs`, as
# mlx-lm's own are.
OWN_FAMILIES = {"opt": opt}

# From the content of config.json to the class of the model and that of its arguments.
ModelClasses = Callable[[dict[str, Any]], tuple[Any, Any]]

_WHOLE = "a whole model folder that mlx-lm can load"
_AGAIN = "download or convert it again"


def resolve_dtype(name: str) -> str:
    """The dtype that "auto" means here; other names are returned as they are."""
    # MLX's CPU backend runs quantised and 16-bit weights slowly, row by row; Metal and CUDA do not.
    check_choice("--dtype", name, DTYPES)
    if name != "auto":
        return name
    return "stored" if mx.default_device() == mx.gpu else "float32"


def resolve_draft_bits(name: str) -> int | None:
    """8 if the draft head's weights are to be quantised to 8 bits; None if they stay as stored."""
    # On a GPU, a call of few rows takes as long as its weights take to read. MLX's CPU backend
    # multiplies quantised weights slowly.
    check_choice("draft_head", name, DRAFT_HEADS)
    is_8bit = name == "8bit" or (name == "auto" and mx.default_device() == mx.gpu)
    return 8 if is_8bit else None


def is_quantised(model: nn.Module) -> bool:
    return any(isinstance(module, PACKED_KINDS) for module in model.modules())


def cast_model(
    model: nn.Module,  # mlx-lm's; its weights may be lazy
    dtype: str,  # "stored", which changes nothing, or a float type; not "auto"
) -> nn.Module:
    """The model with weights of `dtype`, quantised ones dequantised; changes the model given."""
    if dtype == "stored":
        return model
    # In float32, as scales multiplied in half precision would not give the stored weights.
    model.set_dtype(mx.float32)
    if is_quantised(model):
        model = utils.dequantize_model(model)
    model.set_dtype(getattr(mx, dtype))
    return model


def may_have_drafting_heads(folder: Path) -> bool:
    """Whether tensors have names of drafting heads; True too if the names cannot be read."""
    try:
        return any(map(is_head_name, tensor_names(folder)))
    except (InputError, OSError):  # mlx-lm's loader says what is wrong with them
        return True


def _without_drafting_heads(model_class: Any) -> Any:
    """A subclass of a model class of mlx-lm that drops drafting heads when it loads weights."""

    class WithoutHeads(model_class):  # type: ignore[misc]  # known at run time
        __module__ = model_class.__module__  # messages name the model by it

        def sanitize(self, weights: dict[str, Any]) -> dict[str, Any]:
            kept = {n: tensor for n, tensor in weights.items() if not n.startswith(MEDUSA_PREFIX)}
            kept = super().sanitize(kept) if hasattr(model_class, "sanitize") else kept
            # After mlx-lm's own function, which may infer from these how norms are stored.
            return {name: tensor for name, tensor in kept.items() if not is_mtp_name(name)}

    return WithoutHeads


def choose_model_classes(folder: Path, config: Mapping[str, Any]) -> ModelClasses:
    """The `get_model_classes` of mlx-lm's loader for a folder.

    It returns subclasses: of mlx-lm's classes, ones that drop drafting heads among the weights; of
    every class, ones that refuse weights in types that it does not compute with.
    """
    file = OWN_FAMILIES.get(config.get("model_type", ""))
    has_heads = file is None and may_have_drafting_heads(folder)

    def guarded_classes(config: dict[str, Any]) -> tuple[Any, Any]:
        model, args = (file.Model, file.ModelArgs) if file else utils._get_classes(config)
        model = _without_drafting_heads(model) if has_heads else model
        return refuse_other_types(model, folder), args

    return guarded_classes


def load_base(
    path: Path,
    dtype: str = "auto",  # one of `DTYPES`
    draft_head: str = "stored",  # one of `DRAFT_HEADS`
    group: Group | None = None,  # processes that share the model
    origin: Origin | None = None,  # its name, and how it was fetched; the rest is set here
) -> tuple[Backbone, dict[str, Any]]:
    """Load a model folder of mlx-lm's or Hugging Face's layout, without an adapter.

    Returns the backbone, its weights evaluated, and the content of config.json.
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
    files: tuple[FileStamp, ...],  # the folder's stamps when it was first loaded
    dtype: str,
    group: Group | None,
    module_paths: Collection[str],
) -> dict[str, nn.Module]:
    """Load some modules of a folder again, by path, as `load_base` loaded them."""
    require_unchanged(path, files)
    model, _ = load_weights(path, dtype, f"{path} cannot be read again", module_paths, group)
    require_unchanged(path, files)
    modules = dict(model.named_modules())
    return {name: modules[name] for name in module_paths}


def load_weights(
    path: Path,
    dtype: str,
    failure: str,  # begins the message if it cannot be loaded
    evaluated_modules: Collection[str] = ("",),  # paths, "" is all; others stay lazy and unread
    group: Group | None = None,  # processes that share the model; this rank keeps its part
) -> tuple[nn.Module, dict[str, Any]]:
    """Build a folder's model with mlx-lm's loader, cast its weights, and evaluate some or all.

    Returns the model and the content of config.json.
    """
    claim_process()
    dtype = resolve_dtype(dtype)
    with open_config(path, failure, expected=_WHOLE, do=_AGAIN) as settings:
        if not settings:  # there is no file, which this says, or an empty one
            read_json(path / "config.json", "a model's settings")
        require_no_code(path)  # before weights are read
        require_known_quantisation(path, settings)
        model, config = utils.load_model(
            path,
            lazy=True,
            model_config=rope_settings(settings),
            trust_remote_code=False,
            get_model_classes=choose_model_classes(path, settings),
        )
    model = cast_model(model, dtype)
    if group is not None:
        shard_over_ranks(model, group)
    modules = dict(model.named_modules())
    with explain_errors(failure, expected=_WHOLE, do=_AGAIN):
        mx.eval([modules[name].parameters() for name in evaluated_modules])
    return model, config


def load_tokenizer(
    path: Path,
    config: dict[str, Any],  # the content of the model's config.json
) -> TokenizerWrapper:
    """The tokenizer of a folder. Its end tokens are those of the model's config, if that has any,
    else its own."""
    with open_config(
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
    adapter: str | Path | None = AUTO_ADAPTER,
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
        model: a folder, an alias such as "smollm2-135m", or a name on the Hub (`org/name`, or
            `org/name@revision`).
        adapter: "auto", the default, as for an engine and every command: an adapter that
            `ssmlx.adapt` made here from these very weights, or else a bundled one for chats that
            belongs to the model; the log says which. Or an adapter folder, or the name of an
            adapter that ships with the package (`ssmlx.bundled_adapters`), that was made here, or
            that is on the Hub. LoRA or DoRA that mlx-lm or PEFT trained is an adapter as well: it
            drafts by prompt lookup. "none" is the base alone. None looks for no adapter. With None
            and "auto", a fused folder has its own streams.
        dtype: "stored", "float32", "float16", "bfloat16", or "auto": as stored on a GPU, float32 on
            the CPU backend. Quantised weights are dequantised for the float types.
        merge_lora: add LoRA that acts on every row into unquantised weights, which makes it free at
            run time; `swap_adapter` reads the original weights of these layers again. False keeps
            the LoRA apart.
        draft_head: the weights of the LM head's copy that drafts from a draft vocabulary: "stored",
            as the head's own; "8bit", quantised, a quarter of float32's memory, which may change a
            guess but no answer; or "auto": quantised on a GPU.
        group: processes that share the model, such as `mx.distributed.init()` gives: each keeps its
            part of every layer, and all must do the same calls, one answer at a time.
        cache_dir: the folder for what is downloaded; by default ssmlx's cache folder for aliases,
            and the Hub's own for models of the Hub.
        offline: download nothing.
        progress: called with (bytes so far, bytes in all) of a download, from any thread; what it
            raises stops the download.

    Returns:
        The model, its weights evaluated, and mlx-lm's tokenizer.

    Raises:
        InputError: an argument is missing, broken, or does not fit the others; or the model has to
            be downloaded, and cannot be.
    """
    fetch = Fetch(cache_dir=cache_dir, offline=offline, progress=progress)
    name = None if adapter in (None, AUTO_ADAPTER) else adapter
    # A named adapter is read first, as the base takes long to load.
    folder = None if name is None else resolve_adapter(name, fetch)
    path = resolve_model(model, fetch)
    if name is None and (path / CONFIG_FILE).exists():  # a fused folder has streams of its own
        folder = path
    found = None if folder is None else load_adapter(folder, None if name is None else str(name))
    origin = Origin(name=str(model), cache_dir=cache_dir, offline=offline)
    backbone, config = load_base(path, dtype, draft_head, group, origin)
    tokenizer = load_tokenizer(path, config)
    asked = AUTO_ADAPTER if found is None and adapter == AUTO_ADAPTER else found
    return swap_adapter(StreamFusedModel(backbone), asked, merge_lora=merge_lora), tokenizer
