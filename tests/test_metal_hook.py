"""From a model's layers to the fused kernel and back: masks as bits, the hook, the switch."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from metal import shim
from mlx_lm.models import base as mlx_lm_base
from tiny import first_tokens, make_base, make_model

from ssmlx.decoding.loop import plain_decode, streaming_decode
from ssmlx.drafters.streams import StreamDrafter
from ssmlx.errors import InputError
from ssmlx.model import metal
from ssmlx.model.backbone import Backbone
from ssmlx.model.cache import PathColumns, TreeCache
from ssmlx.model.masks import MaskBuffer
from ssmlx.model.metal import hook, kernels, switch
from ssmlx.model.metal.mask import StepMasks, TreeMask, pack_bits
from ssmlx.model.metal.plan import Chip
from ssmlx.settings import PruneConfig, TreeConfig

BASE_CHIP = Chip.of("applegpu_g13g")
PROMPT = [1, 4, 2, 9, 6]


def forget() -> None:
    """What was learnt about this machine."""
    hook.agrees_with_mlx.cache_clear()
    hook._plan_for.cache_clear()


@pytest.fixture(autouse=True)
def _auto_again() -> Iterator[None]:
    forget()
    yield
    metal.use("auto")
    forget()


@pytest.fixture
def on_shim(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> shim.Shim:
    """As on a Mac, but for the shim in the GPU's place."""
    if shim.COMPILER is None:
        pytest.skip(shim.NO_COMPILER)
    runner = shim.Shim(Path(request.config.cache.mkdir("metal")))
    monkeypatch.setattr(switch, "is_available", lambda: True)
    monkeypatch.setattr(hook, "this_chip", lambda: BASE_CHIP)
    monkeypatch.setattr(kernels, "run_on_metal", runner)
    return runner


# ---- bits ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (2, 33), (7, 7), (16, 32), (40, 70)])
def test_bits_are_the_columns_of_a_row_and_ones_behind_them(rows: int, columns: int) -> None:
    visible = np.random.default_rng(rows).random((rows, columns)) < 0.4
    words = np.array(pack_bits(mx.array(visible)))
    assert words.dtype == np.uint32
    bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little").astype(bool)
    np.testing.assert_array_equal(bits[:, :columns], visible)
    assert bits[:, columns:].all()


@pytest.mark.parametrize("rows", range(1, 10))
def test_bits_are_never_so_few_that_mlx_moves_them_to_constant_memory(rows: int) -> None:
    assert pack_bits(mx.ones((rows, rows), mx.bool_)).size >= 8


class Seen:
    """A cache as masks know it: one path of 3 entries, of which 2 count."""

    offset, capacity = 5, 16
    path_columns = PathColumns((mx.array([2]),), (3,))


class Taker:
    """A model as masks know it."""

    def __init__(self, takes: bool) -> None:
        self.takes_tree_masks = takes


def test_both_forms_of_a_mask_say_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switch, "is_available", lambda: True)
    visible = mx.tri(4, dtype=mx.bool_)
    mask = StepMasks(Taker(True)).mask(visible, Seen(), None)
    assert isinstance(mask, TreeMask)
    expected = np.array(MaskBuffer().mask(visible, Seen(), None))
    np.testing.assert_array_equal(np.array(mask.dense), expected)
    np.testing.assert_array_equal(np.array(mask.visible), expected[:, :7])
    words = np.array(mask.bits)[:, 0]
    assert [int(word) & 0x7F for word in words] == [0b0110001, 0b0110011, 0b0110111, 0b0111111]


def test_dense_mask_is_made_only_if_a_layer_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switch, "is_available", lambda: True)
    masks = StepMasks(Taker(True))
    mask = masks.mask(mx.tri(4, dtype=mx.bool_), Seen(), None)
    assert masks.nbytes == 0
    assert isinstance(mask, TreeMask)
    assert mask.dense is mask.dense
    assert masks.nbytes > 0


@pytest.mark.parametrize(("available", "takes"), [(False, True), (True, False)])
def test_mask_is_an_array_where_the_kernel_cannot_be_used(
    available: bool, takes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(switch, "is_available", lambda: available)
    mask = StepMasks(Taker(takes)).mask(mx.tri(4, dtype=mx.bool_), Seen(), None)
    assert isinstance(mask, mx.array)


def test_fused_for_a_model_that_cannot_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switch, "is_available", lambda: True)
    metal.use("fused")
    with pytest.raises(InputError, match="attention of its own"):
        StepMasks(Taker(False)).mask(mx.tri(4, dtype=mx.bool_), Seen(), None)


# ---- the switch ----------------------------------------------------------------------------------


def test_without_metal_fused_is_an_error_and_auto_is_off() -> None:
    if metal.is_available():
        pytest.skip("Metal is here")
    with pytest.raises(InputError, match="no Metal device here; expected a Mac"):
        metal.use("fused")
    assert metal.in_use() == "auto"
    assert not switch.is_on()


def test_an_unknown_choice_is_an_error() -> None:
    with pytest.raises(InputError, match="--attention metal; expected one of auto, mlx, fused"):
        metal.use("metal")  # type: ignore[arg-type]


def test_mlx_switches_it_off(on_shim: shim.Shim) -> None:
    assert switch.is_on()
    metal.use("mlx")
    assert not switch.is_on()
    model = make_model()
    cache = model.make_cache()
    drafter = StreamDrafter(model, TreeConfig(size=6), model.num_streams, "fused")
    first_tokens(streaming_decode(model, PROMPT, cache, drafter=drafter), 6)
    assert on_shim.calls == 0


# ---- the hook ------------------------------------------------------------------------------------


def test_other_users_of_the_module_get_mlxs_own_attention() -> None:
    model = make_base("qwen2")
    tokens = mx.array([[1, 2, 3, 4]])
    before = model(tokens)
    assert hook.hook_layers(model.layers)
    assert hook.hook_layers(model.layers)  # once is enough
    module = sys.modules[type(model.layers[0].self_attn).__module__]
    hooked = module.scaled_dot_product_attention
    assert hooked.__wrapped__ is mlx_lm_base.scaled_dot_product_attention
    assert mx.array_equal(model(tokens), before)
    queries, keys = mx.random.normal((1, 4, 3, 8)), mx.random.normal((1, 2, 5, 8))
    expected = mx.fast.scaled_dot_product_attention(queries, keys, keys, scale=0.3, mask=None)
    assert mx.array_equal(hooked(queries, keys, keys, None, 0.3, None), expected)


def test_layers_without_mlx_lms_function_are_left_alone() -> None:
    class Attention:
        def __call__(self, x: mx.array, mask: object, cache: object) -> mx.array:
            return mx.fast.scaled_dot_product_attention(x, x, x, scale=1.0, mask=mask)

    class Layer:
        self_attn = Attention()

    assert not hook.hook_layers([Layer()])
    assert not hook.hook_layers([object()])


def test_layers_that_look_into_the_mask_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = Backbone(make_base("llama"))
    attention = type(backbone.layers[0].self_attn)
    original = attention.__call__

    def looks(self, x, mask=None, cache=None):
        if mask is not None and not isinstance(mask, str):
            mask = mask.astype(mx.bool_)
        scaled_dot_product_attention  # noqa: B018, F821
        return original(self, x, mask, cache)

    looks = type(original)(looks.__code__, original.__globals__, closure=looks.__closure__)
    monkeypatch.setitem(original.__globals__, "mx", mx)
    monkeypatch.setattr(attention, "__call__", looks)
    assert hook.hook_layers(backbone.layers)
    assert backbone.takes_tree_masks is False


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "phi3"])
def test_layers_of_mlx_lm_take_tree_masks(architecture: str) -> None:
    assert Backbone(make_base(architecture)).takes_tree_masks


# ---- whole answers -------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["fused", "second-pass"])
@pytest.mark.parametrize("prune", [PruneConfig(), PruneConfig(kind="budget", keep=4)], ids=str)
def test_answers_through_the_kernel_are_plain_decodings(
    schedule: str, prune: PruneConfig, on_shim: shim.Shim
) -> None:
    metal.use("fused")
    model = make_model("llama", "all")
    drafter = StreamDrafter(model, TreeConfig(size=7), model.num_streams, schedule)
    cache = model.make_cache()
    steps = streaming_decode(model, PROMPT, cache, drafter=drafter, prune=prune)
    tokens, _ = first_tokens(steps, 10)
    assert on_shim.calls > 12
    expected = list(itertools.islice(plain_decode(model, PROMPT, model.make_cache()), 10))
    assert tokens == [token for (token,) in expected]


def test_auto_takes_the_kernel_where_mlx_falls_back(on_shim: shim.Shim) -> None:
    """Heads of 8, as tiny models have them, have no kernel of MLX's."""
    backbone, cache = Backbone(make_base()), TreeCache(3, scratch=6)
    positions, visible = mx.arange(6), mx.tri(6, dtype=mx.bool_)
    hidden = backbone.embed(mx.arange(6))

    def outputs(mask: object) -> mx.array:
        views = [cache.tree_view(layer, positions) for layer in range(3)]
        return backbone.run(hidden, 0, 3, mask, views)

    assert backbone.takes_tree_masks
    found = outputs(TreeMask(visible, lambda: visible))
    assert on_shim.calls > 0
    np.testing.assert_allclose(np.array(found), np.array(outputs(visible)), atol=1e-5)


def test_a_kernel_that_disagrees_with_mlx_is_not_used(
    on_shim: shim.Shim, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(kernel: kernels.Kernel, call: kernels.Call) -> list[mx.array]:
        return [1.01 * found for found in on_shim(kernel, call)]

    queries, keys = mx.zeros((1, 4, 6, 8)), mx.zeros((1, 2, 20, 8))
    assert hook.plan_for(queries, keys)
    forget()
    monkeypatch.setattr(kernels, "run_on_metal", wrong)
    with pytest.warns(UserWarning, match="differs from MLX's by"):
        assert not hook.plan_for(queries, keys)
    metal.use("fused")
    with pytest.raises(InputError, match="a GPU that runs the kernel"):
        hook.plan_for(queries, keys)


def test_a_kernel_that_does_not_run_is_not_used(
    on_shim: shim.Shim, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(kernel: kernels.Kernel, call: kernels.Call) -> list[mx.array]:
        raise RuntimeError("no such\npipeline")

    monkeypatch.setattr(kernels, "run_on_metal", fails)
    with pytest.warns(UserWarning, match=r"does not run \(no such pipeline\)"):
        assert not hook.plan_for(mx.zeros((1, 4, 6, 8)), mx.zeros((1, 2, 20, 8)))


def test_fused_for_heads_that_it_cannot_is_an_error(on_shim: shim.Shim) -> None:
    metal.use("fused")
    with pytest.raises(InputError, match="heads of 256"):
        hook.plan_for(mx.zeros((1, 4, 6, 256)), mx.zeros((1, 2, 20, 256)))
