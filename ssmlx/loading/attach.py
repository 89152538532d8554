"""Putting an adapter's streams and LoRA on a loaded base, taking them off, and exchanging them."""

import logging
from contextlib import suppress
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..errors import InputError, require
from ..model.backbone import Backbone
from ..model.lora import (
    EXPERTS,
    LORA_KINDS,
    RowScope,
    attach_lora,
    expected_lora_shapes,
    is_mergeable,
)
from ..model.ranks import LINEARS
from ..model.streams import StreamFusedModel
from .adapt_runs import find_runs_by_weights, log_outdated
from .adapter import Adapter, StreamAdapter, cast_streams, load_adapter, read_base_identity
from .folders import Fetch
from .identity import BaseIdentity, digest_arrays
from .lora_files import Loras, lora_tensors, stack_experts
from .names import (
    ADAPTER_LOG,
    AUTO_ADAPTER,
    DEFAULT_ADAPTER,
    NO_ADAPTER,
    adapters_made_here,
    bundled_adapters,
    resolve_adapter,
)
from .tensors import check_tensors

_log = logging.getLogger(ADAPTER_LOG)


def require_same_base(adapter: StreamAdapter, backbone: Backbone) -> None:
    """Refuse an adapter whose streams were made for another model; its LoRA is not looked at."""
    wanted = adapter.config.base_model or "the model it was converted for"
    adapter.base.require_same(
        BaseIdentity.of(backbone),
        "the adapter belongs",
        expected=f"{wanted}, not {backbone.origin.name}",
        do="choose that model with --model, or another --adapter",
    )


def match_lora(adapter: Adapter, backbone: Backbone) -> Loras:
    """An adapter's LoRA on every row, checked, by the base model's own module paths."""
    # Files may name the modules with other wrappers (`language_model`) in front.
    modules: dict[str, Any] = dict(backbone.model.named_modules())
    places = {_strip_wrappers(path): path for path in modules}
    lora = {
        path if path in modules else places.get(_strip_wrappers(path), path): weights
        for path, weights in adapter.lora.items()
    }
    experts = {path: one.num_experts for path, one in modules.items() if isinstance(one, EXPERTS)}
    lora = stack_experts(lora, experts)
    try:
        check_lora(backbone.model, lora, "the adapter")
    except InputError as error:
        trained_on = f", which was trained on {adapter.base_model}" if adapter.base_model else ""
        raise InputError(
            f"{error.found}{trained_on}",
            expected=f"LoRA that fits the layers of {backbone.origin.name}",
            do="choose the model that it was trained on with --model, or another --adapter",
        ) from error
    is_plain = all(
        isinstance(modules[path], LINEARS) and weights.magnitude is None
        for path, weights in lora.items()
    )
    require(
        backbone.group is None or is_plain,
        "an adapter with DoRA, or with LoRA of embeddings or experts, for a model split over "
        "processes",
        expected="LoRA of linear layers",
        do="run it on one machine, or fuse the adapter into the model",
    )
    return lora


def _strip_wrappers(module_path: str) -> str:
    """A module's path without the wrappers in front: "layers.0.mlp" of "model.layers.0.mlp"."""
    parts = module_path.split(".")
    names = ("model", "language_model")
    first = next((n for n, part in enumerate(parts) if part not in names), len(parts))
    return ".".join(parts[first:])


def check_lora(
    model: nn.Module,  # mlx-lm's, without LoRA on it
    lora: Loras,  # by the model's module paths
    source: str | Path,  # for messages
    kinds: tuple[type, ...] = LORA_KINDS,
) -> None:
    """Refuse LoRA unless every module is one of `kinds` and its tensors are finite and fit it."""
    modules: dict[str, nn.Module] = dict(model.named_modules())
    modules = {path: layer for path, layer in modules.items() if isinstance(layer, kinds)}
    expected = {
        f"{path}.{leaf}": shape
        for path, weights in lora.items()
        for leaf, shape in expected_lora_shapes(modules.get(path), weights).items()
    }
    check_tensors(lora_tensors(lora), expected, source)


def lora_digest(lora: Loras) -> str | None:
    """64 hexadecimal digits, the digest of all LoRA weights and scales; waits for the device. None
    without LoRA."""
    pairs = (
        (f"{path} {one.scale}" + ("" if one.acts_on_head else " embeds"), array)
        for path, one in lora.items()
        for array in one.arrays
    )
    return digest_arrays(pairs) if lora else None


def attach_adapter(
    backbone: Backbone,  # the base, or a model on it
    adapter: Adapter,
    *,
    merge_lora: bool,  # into the weights of layers that are not quantised
) -> StreamFusedModel:
    """Put an adapter on a copy of the base's modules that shares its arrays.

    LoRA on stream rows alone is never merged. The model's weights are evaluated.
    """
    # 1. What does not fit is refused, before layers of the base are read again, or copied.
    streams = adapter if isinstance(adapter, StreamAdapter) else None
    if streams is not None:
        require_same_base(streams, backbone)
    # 2. LoRA is compared with the layers of the base alone: an earlier adapter's are other modules.
    base = backbone.without_adapter()
    lora = match_lora(adapter, base)
    stream_lora = {} if streams is None else streams.stream_lora
    check_lora(base.model, stream_lora, "the adapter", LINEARS)
    # 3. Layers are exchanged in a copy.
    copied = base.clone_sharing_weights()
    has_own_lora = streams is not None and streams.config.adapter_scope == "streams"
    own = stream_lora if has_own_lora else None
    scope = _exchange_layers(copied, lora, own, merge_lora=merge_lora)
    # 4. All is computed here: the first answer would merge and cast, which takes time and memory.
    mx.eval(copied.model.parameters())
    if streams is None:
        fused = StreamFusedModel(copied, scope=scope)
    else:
        weights = cast_streams(streams.streams, copied.dtype)
        mx.eval(weights.trainable_arrays)
        fused = StreamFusedModel(copied, streams.config, weights, scope)
    fused.lora_digest = lora_digest(lora)
    fused.adapter_name = adapter.name
    return fused


def _exchange_layers(
    backbone: Backbone,  # a copy of the base, without LoRA
    lora: Loras,  # for every row, by module path
    stream_lora: Loras | None,  # None: streams have no LoRA of their own
    *,
    merge_lora: bool,
) -> RowScope:
    """Put LoRA on a backbone's layers, in place; return the rows that the streams' LoRA acts on,
    for the model to set. `replaced` becomes the base's own layers, or None for layers that LoRA was
    merged into and that can be read again."""
    model = backbone.model
    dtype = backbone.dtype
    scope = RowScope(0)  # every row, from the first on
    replaced = attach_lora(model, lora, scope, merge=merge_lora, dtype=dtype)
    dropped = []
    if merge_lora and backbone.origin.reload is not None:
        dropped = [path for path, layer in replaced.items() if is_mergeable(layer, lora[path])]
    if stream_lora is not None:
        # After the other: a layer with both is wrapped with the LoRA of every row inside.
        scope = RowScope()  # no row, until the model sets that of the streams
        of_streams = attach_lora(model, stream_lora, scope, merge=False, dtype=dtype)
        # Of such a layer the base's own is what the first call replaced.
        replaced = {**of_streams, **replaced}
    backbone.replaced = {**replaced, **dict.fromkeys(dropped)}
    backbone.refresh_parts()
    return scope


def swap_adapter(
    model: StreamFusedModel, adapter: Adapter | str | Path | None, *, merge_lora: bool = True
) -> StreamFusedModel:
    """Return the same base model with another adapter, without loading the base again.

    Only the layers that LoRA was merged into are read again, from the model's folder. `model` stays
    as it is, and both share what the adapters leave alone; what is no longer used is freed. A cache
    belongs to the model that filled it, as an adapter may change keys and values.

    Args:
        model: as `load` or `swap_adapter` returned it.
        adapter: a folder or a name as `load` takes it (downloaded as `load` was asked to), an
            adapter in memory, "auto" for the adapter that a chat takes by default, or None (or
            "none") for the base model. Of a fused folder, the base is the model in that folder;
            give the folder itself for its own streams.
        merge_lora: as for `load`.

    Returns:
        A new model; the base alone if "auto" finds nothing.

    Raises:
        InputError: the adapter is missing, broken, or belongs to another model; or the model's
            folder cannot be read again.
    """
    if isinstance(adapter, str | Path):
        own = model.backbone.origin
        fetch = Fetch(cache_dir=own.cache_dir, offline=own.offline)
        name, folder = choose_adapter(adapter, model, fetch)
        adapter = None if folder is None else load_adapter(folder, name)
    if adapter is None:
        return StreamFusedModel(model.backbone.without_adapter())
    return attach_adapter(model.backbone, adapter, merge_lora=merge_lora)


def find_adapters_of_base(model: StreamFusedModel) -> dict[str, Path]:
    """Adapters with streams, made here or bundled, that belong to a model's base, by name.

    Those made here come first, the newest first; a bundled adapter hides one of the same name.
    """
    identity = BaseIdentity.of(model.backbone)
    found = {}
    for name, folder in {**adapters_made_here(), **bundled_adapters()}.items():
        with suppress(InputError):
            if read_base_identity(folder).find_difference(identity) is None:
                found[name] = folder
    return found


def choose_adapter(
    asked: str | Path, model: StreamFusedModel, fetch: Fetch | None = None
) -> tuple[str, Path | None]:
    """The name and folder of the adapter that a user means, "auto" included; nothing is loaded.

    The base alone is "none" and None. What "auto" means is logged.
    """
    if asked != AUTO_ADAPTER:
        return str(asked), resolve_adapter(asked, fetch)
    found = find_default_adapter(model)
    if found is None:
        _log.info("%s: no adapter was found for it", model.backbone.origin.name)
        return NO_ADAPTER, None
    source = "ships with ssmlx" if found[0] == DEFAULT_ADAPTER else "was made here for it"
    line = '%s: the adapter %s, which %s; adapter="none" is the base alone'
    _log.info(line, model.backbone.origin.name, found[0], source)
    return found


def find_default_adapter(model: StreamFusedModel) -> tuple[str, Path] | None:
    """The adapter that drafts by default: the newest that pays of those made here from exactly
    these weights, else "chat" if it belongs to the model.
    """
    backbone = model.backbone
    found = find_runs_by_weights(backbone.origin.folder, backbone.origin.name)
    log_outdated(found, backbone.origin.name)
    names = [found.chosen.name] if found.chosen else []
    fitting = find_adapters_of_base(model)
    return next(
        ((name, fitting[name]) for name in (*names, DEFAULT_ADAPTER) if name in fitting), None
    )


def read_task_lora(folder: Path, backbone: Backbone) -> Loras:
    """The LoRA of --task-lora by module path; streams in its folder are not returned."""
    expected = "LoRA that changes what the model says"
    require(folder.is_dir(), f"no folder {folder}", expected=expected, do="check --task-lora")
    adapter = load_adapter(folder)
    found = f"{folder} has no LoRA that acts on every row"
    require(bool(adapter.lora), found, expected=expected, do="check --task-lora")
    if isinstance(adapter, StreamAdapter):
        require_same_base(adapter, backbone)
    return match_lora(adapter, backbone)
