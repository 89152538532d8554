"""The fused attention kernel: MLX's own generated source run on the CPU, and the way to it."""

import itertools
import random
import sys
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from device_log import on_clock
from loops import plain_tokens, speculative_steps
from metal import shim
from metal.cases import Case, error_of, error_on_metal, run_case
from metal.lint import complaints
from mlx_lm.models import base as mlx_lm_base
from refusals import mentions, refusal
from tiny import first_tokens, make_base, make_model, slow

from ssmlx.drafters.stream_drafter import StreamDrafter
from ssmlx.model import metal
from ssmlx.model.backbone import Backbone
from ssmlx.model.cache import TreeCache
from ssmlx.model.masks import StepMasks
from ssmlx.model.metal import TreeMask, hook, is_available, kernels, trial
from ssmlx.model.metal.division import (
    DTYPES,
    AttentionShape,
    Bucket,
    Chip,
    Division,
    divide_attention,
)
from ssmlx.model.metal.kernels import FUNCTIONS, LANES, Call, Kernel, attend, pack_bits
from ssmlx.settings import PruneConfig, TreeConfig

M1, M1_MAX, M2_ULTRA = (Chip.of(f"applegpu_g{name}") for name in ("13g", "13s", "14d"))
HALF = mx.float16
PROMPT = [1, 4, 2, 9, 6]
needs_compiler = pytest.mark.skipif(shim.COMPILER is None, reason=shim.NO_COMPILER)


@pytest.fixture(scope="session")
def programs(request):
    """Where compiled kernels are kept, by the hash of their text."""
    return Path(request.config.cache.mkdir("metal"))


def forget():
    """What was learnt about this machine."""
    hook._trials.clear()
    hook._wanted.clear()
    hook._division_and_bucket.cache_clear()


@pytest.fixture(autouse=True)
def _auto_again():
    forget()
    yield
    metal.choose_attention("auto")
    forget()


@pytest.fixture
def on_shim(monkeypatch, programs):
    """As on a Mac, but for the shim in the GPU's place."""
    if shim.COMPILER is None:
        pytest.skip(shim.NO_COMPILER)
    runner = shim.Shim(programs)
    monkeypatch.setattr(hook, "is_available", lambda: True)
    monkeypatch.setattr(hook, "this_chip", lambda: M1)
    monkeypatch.setattr(kernels, "run_on_metal", runner)
    return runner


@pytest.fixture
def speeds(monkeypatch):
    """Seconds that a timed call of MLX's attention and of the kernel's seems to take."""
    seconds = {"mlx": 2.0, "fused": 1.0}
    tried = []
    now = [0.0]
    real = trial.try_kernel

    def run_layers(queries, key_values, way):
        now[0] += seconds["mlx" if isinstance(way, partial) else "fused"]
        return queries

    monkeypatch.setattr(trial, "clock", lambda: now[0])
    monkeypatch.setattr(trial, "run_layers", run_layers)
    monkeypatch.setattr(hook, "try_kernel", lambda *a: tried.append(a[0]) or real(*a))
    return seconds, tried


class NotingTrials:
    """Has the same tree drafted at every call, and notes the seconds of each, and how many trials
    there were when it was read."""

    def __init__(self, shape, tried):
        self._shape = shape
        self._tried = tried
        self.calls = []

    def next(self, *, is_read=False):
        return self._shape

    def record(self, call):
        self.calls.append((call.seconds, len(self._tried)))


CASES = {
    "a tree": Case(),
    "no committed tokens": Case(rows=21, committed=0),
    "one key": Case(rows=1, committed=0, heads=1, kv_heads=1),
    "a whole number of tiles": Case(rows=32, committed=96),
    "columns without rows": Case(rows=4, extra=9, committed=50, heads=4),
    "a chain": Case(rows=40, density=1.0),
    "only itself": Case(rows=70, committed=0, density=0.0),
    "streams: most tiles unseen": Case(rows=200, committed=33, heads=3, kv_heads=1, density=0.02),
    "split keys": Case(rows=24, committed=300, splits=3),
    "more splits than a row sees": Case(rows=70, committed=5, density=0.0, splits=3),
    "several threadgroups of rows": Case(rows=30, heads=8, kv_heads=1, head_size=128),
    "two blocks a simdgroup": Case(rows=40, heads=4, kv_heads=2, head_size=64),
    "eight heads a key/value head": Case(rows=5, heads=8, kv_heads=1),
    "heads of 80": Case(head_size=80),
    "heads of 8": Case(head_size=8, rows=5),
    "half precision": Case(dtype=mx.float16),
    "half precision, split": Case(dtype=mx.float16, committed=300, splits=2),
    "bfloat16": Case(dtype=mx.bfloat16, head_size=128),
    "bfloat16, split": Case(dtype=mx.bfloat16, head_size=128, committed=260, splits=2),
}


def cases(*quick):
    """Every case; all but the `quick` ones compile a kernel of their own, or take a while."""
    return [
        pytest.param(case, id=name, marks=() if name in quick else pytest.mark.slow)
        for name, case in CASES.items()
    ]


@needs_compiler
@pytest.mark.parametrize("case", cases("a tree", "one key", "only itself", "split keys"))
def test_kernel_agrees_with_float64(case, programs):
    assert error_of(case, programs) < 1


@pytest.mark.metal
@pytest.mark.skipif(not is_available(), reason="needs an Apple GPU")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_kernel_agrees_with_float64_on_a_gpu(case):
    assert error_on_metal(case) < 1


@needs_compiler
@pytest.mark.parametrize("order", range(1, 6))
def test_kernel_does_not_depend_on_which_threads_run_first(order, programs):
    case = Case(rows=24, committed=150, splits=2, density=0.1)
    first = run_case(case, programs)
    np.testing.assert_array_equal(run_case(replace(case, order=order), programs), first)


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("seed", range(12))
def test_kernel_agrees_on_random_sizes(seed, programs):
    rng = np.random.default_rng(seed)
    kv_heads = int(rng.integers(1, 4))
    case = Case(
        rows=int(rng.integers(1, 80)),
        extra=int(rng.integers(0, 20)),
        committed=int(rng.integers(0, 400)),
        heads=kv_heads * int(rng.integers(1, 5)),
        kv_heads=kv_heads,
        density=float(rng.random()),
        splits=int(rng.integers(1, 4)),
        order=seed,
        seed=seed,
    )
    assert error_of(case, programs) < 1


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("case", [
    Case(rows=33, committed=31, heads=3, kv_heads=3, order=1),
    Case(rows=24, extra=3, committed=100, splits=2, dtype=mx.float16, order=2),
], ids=["whole", "split"])  # fmt: skip
def test_kernel_stays_within_its_buffers(case, programs):
    assert error_of(case, programs, flags=shim.SANITISE) < 1


class Recorder:
    """Takes the place of Metal: keeps the sources that MLX generates, and gives zeros."""

    def __init__(self):
        self.sources: list[str] = []

    def __call__(self, kernel: Kernel, call: Call) -> list[mx.array]:
        self.sources.append(shim.generated_source(kernel, call))
        pairs = zip(call.output_shapes, call.output_dtypes, strict=True)
        return [mx.zeros(shape, dtype) for shape, dtype in pairs]


def generated(dtype: mx.Dtype = mx.float16, blocks: int = 1) -> list[str]:
    """The sources of all three kernels."""
    record = Recorder()
    queries = mx.zeros((1, 4, 9, 64), dtype)
    keys = mx.zeros((1, 2, 40, 64), dtype)
    for splits in (1, 2):
        division = Division(blocks=blocks, simdgroups=3, row_groups=1, splits=splits)
        attend(queries, keys, keys, mx.zeros((9, 2), mx.uint32), 1.0, division, record)
    return record.sources


def test_source_comes_from_mlx_with_the_strides_of_the_cache():
    whole, split, merge = generated()
    for source in (whole, split, merge):
        assert FUNCTIONS.read_text() in source
        assert "[[kernel]] void custom_kernel_ssmlx_" in source
    named = {b.name: (b.space, b.type) for b in shim.buffers_of(whole)}
    assert named["k"] == named["v"] == named["q"] == ("device", "float16_t")
    assert named["bits"] == ("device", "uint32_t")
    assert named["k_strides"] == ("constant", "int64_t")
    assert [b.name for b in shim.buffers_of(split)][-3:] == ["partial", "largest", "total"]
    assert [b.name for b in shim.buffers_of(merge)][-1] == "out"


def test_row_number_and_context_need_no_new_source():
    """MLX compiles a source once: nothing that changes from step to step may be in it."""
    record = Recorder()
    for rows, num_keys in ((1, 9), (2, 2), (7, 100), (24, 1000)):
        queries = mx.zeros((1, 3, rows, 64))
        keys = mx.zeros((1, 1, num_keys, 64))
        bits = pack_bits(mx.ones((rows, rows), mx.bool_))
        division = Division(blocks=1, simdgroups=-(-3 * rows // 8), row_groups=1, splits=1)
        attend(queries, keys, keys, bits, 1.0, division, record)
    assert len(set(record.sources)) == 1


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("blocks", [1, 2])
def test_compiler_has_no_complaints(blocks, programs):
    for source in generated(blocks=blocks):
        assert shim.build(source, programs).warnings == ""


needs_clang = pytest.mark.skipif(find_spec("clang") is None, reason="no package libclang")


@needs_clang
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_clang_has_no_complaints_with_address_spaces(dtype: mx.Dtype, tmp_path):
    for source in generated(dtype, blocks=2):
        assert complaints(source, tmp_path) == []


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (2, 33), (7, 7), (16, 32), (40, 70)])
def test_bits_are_the_columns_of_a_row_and_ones_behind_them(rows, columns):
    visible = np.random.default_rng(rows).random((rows, columns)) < 0.4
    words = np.array(pack_bits(mx.array(visible)))
    # MLX would move fewer than 8 to constant memory.
    assert words.dtype == np.uint32 and words.size >= 8
    bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little").astype(bool)
    np.testing.assert_array_equal(bits[:, :columns], visible)
    assert bits[:, columns:].all()


class Seen:
    """A cache as masks know it: one path of 3 entries, of which 2 count."""

    offset = 5
    capacity = 16

    def path_masks(self, num_rows):
        return [mx.broadcast_to(mx.array([True, True, False]), (num_rows, 3))]


def test_both_forms_of_a_mask_say_the_same(monkeypatch):
    monkeypatch.setattr(hook, "is_available", lambda: True)
    visible = mx.tri(4, dtype=mx.bool_)
    masks = StepMasks()
    mask = masks.step_mask(visible, Seen(), None, lambda: True)
    assert isinstance(mask, TreeMask) and masks.nbytes == 0
    expected = np.array(StepMasks().dense_mask(visible, Seen(), None))
    np.testing.assert_array_equal(np.array(mask.dense), expected)
    assert mask.dense is mask.dense and masks.nbytes > 0  # made once a layer wants it
    np.testing.assert_array_equal(np.array(mask.visible), expected[:, :7])
    words = np.array(mask.bits)[:, 0]
    assert [int(word) & 0x7F for word in words] == [0b0110001, 0b0110011, 0b0110111, 0b0111111]


@pytest.mark.parametrize(("available", "takes"), [(False, True), (True, False)])
def test_mask_is_an_array_where_the_kernel_cannot_be_used(available, takes, monkeypatch):
    monkeypatch.setattr(hook, "is_available", lambda: available)
    visible = mx.tri(4, dtype=mx.bool_)
    mask = StepMasks().step_mask(visible, Seen(), None, lambda: takes)
    assert isinstance(mask, mx.array)
    if available:
        metal.choose_attention("fused")
        assert mentions(refusal(StepMasks().step_mask, visible, Seen(), None, bool), "attention")


def test_without_metal_fused_is_an_error_and_auto_is_off():
    if metal.is_available():
        pytest.skip("Metal is here")
    assert mentions(refusal(metal.choose_attention, "fused"), "attention=fused")
    line = refusal(metal.choose_attention, "metal")
    assert mentions(line, "attention", "auto", "mlx", "fused")
    assert metal.chosen_attention() == "auto"
    assert not hook.is_on()


def test_mlx_switches_it_off(on_shim):
    assert hook.is_on()
    metal.choose_attention("mlx")
    assert not hook.is_on()
    model = make_model()
    cache = model.make_cache()
    drafter = StreamDrafter(model, TreeConfig(size=6), model.num_streams, "fused")
    first_tokens(speculative_steps(model, PROMPT, [drafter], cache), 6)
    assert on_shim.calls == 0


def test_other_users_of_the_module_get_mlxs_own_attention():
    model = make_base("qwen2")
    tokens = mx.array([[1, 2, 3, 4]])
    before = model(tokens)
    assert hook.hook_layers(model.layers)
    assert hook.hook_layers(model.layers)  # once is enough
    module = sys.modules[type(model.layers[0].self_attn).__module__]
    hooked = module.scaled_dot_product_attention
    assert hooked.__wrapped__ is mlx_lm_base.scaled_dot_product_attention
    assert mx.array_equal(model(tokens), before)
    queries = mx.random.normal((1, 4, 3, 8))
    keys = mx.random.normal((1, 2, 5, 8))
    expected = mx.fast.scaled_dot_product_attention(queries, keys, keys, scale=0.3, mask=None)
    assert mx.array_equal(hooked(queries, keys, keys, None, 0.3, None), expected)


def test_layers_without_mlx_lms_function_are_left_alone():
    class Attention:
        def __call__(self, x: mx.array, mask: object, cache: object) -> mx.array:
            return mx.fast.scaled_dot_product_attention(x, x, x, scale=1.0, mask=mask)

    class Layer:
        self_attn = Attention()

    assert not hook.hook_layers([Layer()])
    assert not hook.hook_layers([object()])


def test_layers_that_look_into_the_mask_are_found_out(monkeypatch):
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
def test_layers_of_mlx_lm_take_tree_masks(architecture):
    assert Backbone(make_base(architecture)).takes_tree_masks


@pytest.mark.parametrize("schedule", ["second-pass", *slow("fused")])
@pytest.mark.parametrize("prune", [PruneConfig(), PruneConfig(kind="budget", keep=4)], ids=str)
def test_answers_through_the_kernel_are_plain_decodings(schedule, prune, on_shim):
    metal.choose_attention("fused")
    model = make_model("llama", "all")
    drafter = StreamDrafter(model, TreeConfig(size=7), model.num_streams, schedule)
    cache = model.make_cache()
    tokens, _ = first_tokens(speculative_steps(model, PROMPT, [drafter], cache, prune=prune), 10)
    assert on_shim.calls > 12
    assert tokens == plain_tokens(model, PROMPT, 10)


def attention_of(rows=6, keys=20):
    """Queries and keys of a step."""
    return mx.zeros((1, 4, rows, 8)), mx.zeros((1, 2, keys, 8))


@pytest.mark.parametrize(("seconds", "is_taken"), [(1.0, True), (1.95, False), (3.0, False)])
def test_auto_takes_what_was_clearly_faster(seconds, is_taken, on_shim, speeds):
    """Until it was tried, MLX's own; and what was found is remembered."""
    times, tried = speeds
    times["fused"] = seconds
    assert hook.choose_division(*attention_of()) is None and not tried
    hook.time_pending_shape()
    assert [(one.rows, one.keys) for one in tried] == [(6, 20)]
    for rows, keys in ((6, 20), (5, 17), (8, 32)):
        assert bool(hook.choose_division(*attention_of(rows, keys))) == is_taken
    hook.time_pending_shape()
    assert len(tried) == 1
    assert hook.choose_division(*attention_of(9, 20)) is None  # more rows than were tried
    assert hook.choose_division(*attention_of(6, 33)) is None
    hook.time_pending_shape(), hook.time_pending_shape(), hook.time_pending_shape()
    assert len(tried) == 3


def test_a_taken_kernel_says_what_mlx_says(on_shim, speeds):
    backbone = Backbone(make_base())
    cache = TreeCache(3, scratch=6)
    positions = mx.arange(6)
    visible = mx.tri(6, dtype=mx.bool_)
    hidden = backbone.embed(mx.arange(6))

    def outputs(mask: object) -> mx.array:
        views = [cache.view(layer, positions) for layer in range(3)]
        return backbone.run(hidden, 0, 3, mask, views)

    assert backbone.takes_tree_masks
    expected = np.array(outputs(visible))
    outputs(TreeMask(visible, lambda: visible))
    hook.time_pending_shape(), hook.time_pending_shape()
    before = on_shim.calls
    found = outputs(TreeMask(visible, lambda: visible))
    assert on_shim.calls == before + 3
    assert np.abs(np.array(found) - expected).max() < 1e-5 * np.abs(expected).max()


def test_nothing_is_tried_before_the_first_token(on_shim, speeds):
    """Nor again in a second answer; one shape a step."""
    _, tried = speeds
    model = make_model()
    expected = plain_tokens(model, PROMPT, 16)
    for first_answer in (True, False):
        drafter = StreamDrafter(model, TreeConfig(size=6), model.num_streams)
        cache = model.make_cache()
        steps = filter(None, speculative_steps(model, PROMPT, [drafter], cache))
        before = len(tried)
        tokens = [*next(steps).tokens]
        calls = on_shim.calls
        assert len(tried) == before
        counts = []
        while len(tokens) < 16:
            tokens += next(steps).tokens
            counts.append(len(tried))
        assert tokens[:16] == expected
        assert all(0 <= b - a <= 1 for a, b in itertools.pairwise(counts))
        assert (len(tried) > before) == first_answer
        assert on_shim.calls > calls
    assert not hook._wanted and len(tried) == len(hook._trials)


@pytest.mark.parametrize("schedule", ["fused", "second-pass"])
def test_a_trial_is_no_calls_time(schedule, on_shim, speeds, monkeypatch):
    """The call that is under way meanwhile has no time; all others have their own."""
    tries = hook.try_kernel
    _, tried = speeds
    model = make_model()
    drafter = StreamDrafter(model, TreeConfig(size=6), model.num_streams, schedule)
    controller = NotingTrials(drafter.largest, tried)
    cache = model.make_cache()
    with on_clock(read=1.0) as clock:
        monkeypatch.setattr(hook, "try_kernel", lambda *given: clock.spend(500.0) or tries(*given))
        first_tokens(speculative_steps(model, PROMPT, [drafter], cache, controller=controller), 24)
    prompts, *calls = controller.calls
    assert prompts == (None, 0) and len(tried) > 1
    assert len(calls) > len(tried) + 2
    before = 0
    for seconds, trials in calls:
        assert seconds == (1.0 if trials == before else None)
        before = trials


def test_a_kernel_that_disagrees_with_mlx_is_not_used(on_shim, speeds, monkeypatch, caplog):
    def wrong(kernel: kernels.Kernel, call: kernels.Call) -> list[mx.array]:
        return [1.01 * found for found in on_shim(kernel, call)]

    monkeypatch.setattr(kernels, "run_on_metal", wrong)
    _, tried = speeds
    for rows in (6, 9, 20):
        assert not hook.choose_division(*attention_of(rows))
        hook.time_pending_shape()
        assert not hook.choose_division(*attention_of(rows))
    assert len(tried) == len(caplog.records) == 1
    metal.choose_attention("fused")
    assert mentions(refusal(hook.choose_division, *attention_of()), "attention=fused")


def test_a_kernel_that_does_not_run_is_not_used(on_shim, monkeypatch, caplog):
    def fails(kernel: kernels.Kernel, call: kernels.Call) -> list[mx.array]:
        raise RuntimeError("NO SUCH\nPIPELINE")

    monkeypatch.setattr(kernels, "run_on_metal", fails)
    assert not hook.choose_division(*attention_of())
    hook.time_pending_shape()
    assert not hook.choose_division(*attention_of())
    assert "NO SUCH PIPELINE" in caplog.text


def test_fused_for_heads_that_it_cannot_is_an_error(on_shim):
    metal.choose_attention("fused")
    wide = (mx.zeros((1, 4, 6, 256)), mx.zeros((1, 2, 20, 256)))
    assert mentions(refusal(hook.choose_division, *wide), "256")


def shape(
    rows, heads: int, kv_heads: int, keys, head_size: int = 64, dtype: mx.Dtype = HALF
) -> AttentionShape:
    """Sizes by position, as the tables below give them."""
    return AttentionShape(
        rows=rows, heads=heads, kv_heads=kv_heads, keys=keys, head_size=head_size, dtype=dtype
    )


@pytest.mark.parametrize("chip", [M1, M1_MAX, M2_ULTRA], ids=str)
def test_division_covers_every_row_within_a_threadgroups_limits(chip):
    rng = random.Random(0)
    for _ in range(300):
        kv_heads = rng.randint(1, 8)
        sizes = shape(
            rng.randint(1, 200),
            kv_heads * rng.randint(1, 8),
            kv_heads,
            rng.randint(200, 20000),
            rng.choice([8, 64, 80, 96, 128]),
        )
        division = divide_attention(sizes, chip)
        held = 8 * division.blocks * division.simdgroups
        assert held * (division.row_groups - 1) < sizes.queries <= held * division.row_groups
        assert LANES * division.simdgroups <= 256
        assert division.blocks == 1 or sizes.head_size <= 80
        assert 1 <= division.splits <= sizes.keys // 128 + 1
        registers = division.blocks * sizes.head_size // 2 + 8 * division.blocks
        assert registers < 100  # query, output and scores, of 128 that a thread has


def test_chips_by_metals_names():
    assert [one.size for one in (M1, M1_MAX, M2_ULTRA)] == ["g", "s", "d"]
    assert Chip.of("something else") == M1


def test_a_trial_speaks_for_shapes_of_the_same_kernels():
    def bucket(rows, keys):
        one = shape(rows, 9, 3, keys)
        return Bucket.of(one, divide_attention(one, M1))

    assert bucket(9, 600) == bucket(16, 1000) != bucket(17, 1000)
    assert bucket(16, 1000) != bucket(16, 1025)
    assert bucket(16, 200) != bucket(16, 256)  # one part, and two
