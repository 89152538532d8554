"""What a call asks of a GPU, counted: the same on every machine."""

import io
import math
import re
from collections import Counter
from dataclasses import replace

import ssmlx  # first: it prefers OpenBLAS  # noqa: F401

import mlx.core as mx  # isort: skip
import numpy as np
import pytest
from device_log import READ, watched
from loops import plain_steps, speculative_steps
from mlx.utils import tree_flatten
from tiny import first_tokens, make_base, make_model, make_packed_base, token_steps
from tiny_heads import make_heads

from ssmlx.decoding.call import plain_call, verify_tree
from ssmlx.decoding.draft_shape import Never
from ssmlx.decoding.drafting import scratch_rows
from ssmlx.decoding.ranking import top_columns
from ssmlx.decoding.sampling import RowPositions, Sampling, last_tokens
from ssmlx.drafters.draft_model import DraftModel, DraftModelDrafter
from ssmlx.drafters.head_drafter import HeadDrafter
from ssmlx.drafters.stream_drafter import StreamDrafter
from ssmlx.loading.load import load
from ssmlx.model.modules import module_arrays
from ssmlx.settings import DraftModelConfig, SamplingConfig, SpeculatorTreeConfig, TreeConfig

# --- Sorts, and passes over all logits ---

BIG = 2048  # a vocabulary that stands out among a step's sizes
SORTS = {"Sort", "ArgSort", "Partition", "ArgPartition"}
VIEWS = {"Broadcast", "Reshape", "ExpandDims", "Squeeze", "Slice", "Flatten", "Unflatten", "Split"}
ELEMENTWISE = {
    "Abs", "Add", "AsType", "Divide", "Equal", "Exp", "Greater", "GreaterEqual", "Less",
    "LessEqual", "Log", "LogicalAnd", "Minimum", "Multiply", "Negative", "Select", "Subtract",
}  # fmt: skip
GATHERS = {"Gather", "GatherAxis"}  # They read as much as they write.
FILTERS = {
    "none": {}, "top-k": {"top_k": 20}, "top-p": {"top_p": 0.9}, "min-p": {"min_p": 0.1},
    "all": {"top_k": 50, "top_p": 0.9, "min_p": 0.01},
}  # fmt: skip


def primitives(function, *arrays):
    """Each primitive of a graph, none of them fused: its name, inputs and outputs."""
    found = []

    def note(entry):
        if entry["type"] == "primitive":
            found.append((entry["name"], entry["inputs"], entry["outputs"]))

    mx.disable_compile()
    try:
        mx.export_function(note, function, *arrays)
    finally:
        mx.enable_compile()
    return found


@pytest.fixture(scope="module")
def big_model():
    return make_model("llama", "streams", vocab=BIG)


def make_drafter(model, kind, sampling):
    """None for plain decoding."""
    if kind == "plain":
        return None
    if kind == "streams":
        return StreamDrafter(model, TreeConfig(size=6), model.num_streams, sampling=sampling)
    if kind == "draft-model":
        draft = DraftModel(make_base(vocab=BIG))
        return DraftModelDrafter(draft, DraftModelConfig(), sampling)
    tree = TreeConfig(size=6) if kind == "medusa" else SpeculatorTreeConfig()
    return HeadDrafter(model.backbone, make_heads(kind, model.backbone), tree, sampling)


@pytest.mark.parametrize("kind, temp, filters", [
    *((kind, 0.8, filters) for kind in ("draft-model", "plain") for filters in FILTERS),
    *((kind, 0.8, "all") for kind in ("streams", "medusa", "mlp-speculator")),
    *((kind, 0.0, "none") for kind in ("streams", "medusa", "mlp-speculator", "draft-model")),
])  # fmt: skip
def test_no_call_sorts_the_vocabulary(big_model, kind, temp, filters):
    """Neither a plain call, nor drafting behind it, nor the call that verifies the tree."""
    sampling = Sampling(SamplingConfig(temp=temp, seed=1, **FILTERS[filters]), BIG)
    drafter = make_drafter(big_model, kind, sampling)
    cache = big_model.make_cache()
    if drafter is not None:
        list(drafter.start([5]) or ())

    def results(token):
        call = plain_call(big_model, token, last_tokens((), 0), cache, sampling)
        if drafter is None:
            return call.arrays_to_read()
        tree = drafter.propose(call.verified, drafter.largest)
        following = verify_tree(big_model, tree, cache, sampler=sampling, tail=call.tail)
        return [*call.arrays_to_read(), *tree.arrays, *following.arrays_to_read()]

    found = primitives(results, mx.array([5]))
    assert any(BIG in shape for _, inputs, _ in found for _, shape, _ in inputs)
    rows = [shape[-1] for name, inputs, _ in found if name in SORTS for _, shape, _ in inputs]
    assert max(rows, default=0) < BIG / 2


@pytest.mark.parametrize("size", [1, 2, 13, 64, 300, 4097, 8192])
@pytest.mark.parametrize("kind", ["distinct", "ties", "equal", "ruled out", "bfloat16"])
def test_top_columns_are_a_stable_sorts(size, kind):
    values = np.random.default_rng(size).normal(0, 3, (3, size)).astype(np.float32)
    if kind == "ties":
        values = values.round()
    if kind == "equal":
        values[:] = 1
    if kind == "ruled out":
        values[:, size // 50 :] = -np.inf
    given = mx.array(values, mx.bfloat16 if kind == "bfloat16" else mx.float32)
    values = np.array(given.astype(mx.float32))
    for count in (1, 2, 7, 60, 256):
        columns, best = top_columns(given, min(count, size))
        expected = np.argsort(-values, axis=1, kind="stable")[:, :count]
        assert np.array_equal(columns, expected)
        assert np.array_equal(best, np.take_along_axis(values, expected, axis=1))


def tree_places(rows):
    """Places of a root and of `rows` - 1 nodes, at most five levels."""
    depths = mx.minimum(mx.arange(rows), 4)
    return RowPositions(mx.array([7]), depths, 5, mx.zeros((rows, 0), mx.int32))


def passes(function, *arrays, size):
    """Primitives that read or write `size` numbers or more. Elementwise ones that feed each other
    are one: `mx.compile` makes a kernel of them."""
    # the kernel of each array that elementwise primitives made; their names
    group = {}
    found = []
    for name, inputs, outputs in primitives(function, *arrays):
        big = [key for key, shape, _ in inputs if math.prod(shape) >= size]
        made = [key for key, shape, _ in outputs if math.prod(shape) >= size]
        if name in VIEWS:
            group |= {key: group[big[0]] for key in made if big and big[0] in group}
        elif name in ELEMENTWISE and made:
            kernels = sorted({group[key] for key in big if key in group}) or [len(found)]
            if kernels[0] == len(found):
                found.append(name)
            group = {k: kernels[0] if v in kernels else v for k, v in group.items()}
            group |= dict.fromkeys(made, kernels[0])
            for merged in kernels[1:]:
                found[merged] = None
        elif made or (big and name not in GATHERS):
            found.append(name)
    return [name for name in found if name]


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("filters", FILTERS)
def test_sampling_reads_the_logits_three_times(filters, dtype):
    """Noise is of places, of which there are fewer than rows; what is settled is of one row."""
    rows = 16
    size = 4096
    sampler = Sampling(SamplingConfig(temp=0.8, seed=1, **FILTERS[filters]), size)
    places = tree_places(rows)
    found = passes(
        lambda logits: sampler.sample(logits, places),
        mx.zeros((rows, size), dtype),
        size=rows * size,
    )
    assert len(found) <= 3, found
    # What was counted as one kernel is one.
    text = io.StringIO()
    mx.export_to_dot(text, sampler.sample(mx.zeros((rows, size)), places))
    names = re.findall(r'label ="(\w+)"', text.getvalue())
    assert "Log" not in names and any("Log" in name for name in names if "Compiled" in name)


@pytest.mark.parametrize("decoding", ["plain", "speculative"])
def test_outgrown_buffers_are_freed_every_256_tokens(decoding, monkeypatch):
    """And after the one piece of the prompt."""
    model = make_model("llama", "streams", num_hidden_layers=2)
    freed = []
    monkeypatch.setattr(mx, "clear_cache", lambda: freed.append(1))
    steps = token_steps(model, [1, 2] * 125, model.make_cache(), decoding=decoding)
    first_tokens(steps, 270)
    assert len(freed) == 1 + 2  # the text has crossed 256 and 512


# --- All primitives of a call, and reads by the host ---

PROMPT = [5, 2, 3, 11, 7]


def as_one(x, *others, **options):
    """A stand-in for what is one kernel on a GPU: one primitive, of x's shape."""
    inputs = [*others, *options.values()]
    return mx.depends(x, [one for one in inputs if isinstance(one, mx.array)])


def attention_as_one(queries, keys, values, *, mask=None, **options):
    if isinstance(mask, mx.array):
        mask = mx.broadcast_to(mask, (*queries.shape[:3], keys.shape[2]))
    return as_one(queries, keys, values, mask)


def graph_of(arrays) -> Counter[str]:
    """How often each primitive stands in the graph that `arrays` are computed by."""
    dot = io.StringIO()
    mx.export_to_dot(dot, *arrays)
    return Counter(re.findall(r'label ="([^"]+)", shape=rectangle', dot.getvalue()))


def decode(model, schedule: str, count: int = 16) -> list[int]:
    """How many tokens each call of an answer advanced by: plain, or by a schedule of streams.

    With "paused" the streams could draft, and none do.
    """
    if schedule == "plain":
        return first_tokens(plain_steps(model, PROMPT), count)[1]
    controller = Never() if schedule == "paused" else None
    own = "second-pass" if schedule == "paused" else schedule
    drafter = StreamDrafter(model, TreeConfig(kind="best", size=8), 3, own)
    return first_tokens(speculative_steps(model, PROMPT, [drafter], controller=controller), count)[
        1
    ]


def counts(model, schedule: str, monkeypatch, *, on_gpu: bool) -> tuple[int, int]:
    """Most primitives of a call, all of them and those that compute.

    On a GPU norms, rotations and attention are one each; the numbers are none then.
    """
    found = [Counter()]
    start = mx.async_eval
    read = mx.array.tolist

    def counting(*arrays):
        found[-1].update(graph_of([array for _, array in tree_flatten(arrays)]))
        start(*arrays)

    def reading(array):
        found.append(Counter())
        return read(array)

    with monkeypatch.context() as patch:
        patch.setattr(mx, "async_eval", counting)
        patch.setattr(mx.array, "tolist", reading)
        if on_gpu:
            patch.setattr(mx.fast, "rms_norm", as_one)
            patch.setattr(mx.fast, "rope", as_one)
            patch.setattr(mx.fast, "scaled_dot_product_attention", attention_as_one)
            patch.setattr("ssmlx.model.rope.is_one_kernel", lambda: True)
        decode(model, schedule)
    steps = found[2:-1]  # each between two reads
    views = [sum(step[name] for name in (*VIEWS, "Transpose")) for step in steps]
    totals = [step.total() for step in steps]
    return max(totals), max(a - b for a, b in zip(totals, views, strict=True))


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize(
    ("scope", "is_packed"), [("streams", False), ("streams", True), ("all", False)]
)
def test_a_call_that_verifies_and_drafts_launches_twice_a_plain_calls_kernels(
    scope, is_packed, on_gpu, monkeypatch
):
    """Of 8 layers, 2 of them with streams; and where all pause, it is a plain call."""
    base = make_packed_base(num_hidden_layers=8) if is_packed else None
    sizes = {} if is_packed else {"num_hidden_layers": 8}
    model = make_model(scope=scope, base=base, merge_lora=False, **sizes)
    found = {
        schedule: counts(model, schedule, monkeypatch, on_gpu=on_gpu)
        for schedule in ("plain", "paused", "fused", "second-pass")
    }
    assert found["paused"] == found["plain"]
    for schedule in ("fused", "second-pass"):
        assert found[schedule][1] <= 2.1 * found["plain"][1], found


@pytest.mark.parametrize(("part", "schedule", "most"), [
    ("condition_rank", "fused", 80), ("condition_rank", "second-pass", 80),
    ("root_init_rank", "second-pass", 12),
])  # fmt: skip
def test_what_an_adapters_parts_launch_more(part, schedule, most, monkeypatch):
    """Kernels of a call: of scoring pairs of tokens, and of a start from the root."""
    models = (make_model(adapter={part: rank}) for rank in (0, 4))
    found = [counts(model, schedule, monkeypatch, on_gpu=True)[1] for model in models]
    assert found[1] - found[0] <= most


@pytest.mark.parametrize("schedule", ["fused", "second-pass"])
def test_the_host_reads_once_a_call(schedule):
    """Also if each token's streams are scored given the token before, and copies are mixed in."""
    model = make_model(scope="streams", adapter={"condition_rank": 4})
    decode(model, schedule)  # constants are computed once
    with watched() as device:
        assert len(decode(model, schedule)) == device.events.count(READ)


# --- Bytes ---


def bytes_moved(function, *arrays) -> int:
    """What the kernels of a GPU would read and write, were no two of them fused."""
    moved = 0
    for name, inputs, outputs in primitives(function, *arrays):
        touched = [*inputs, *outputs]
        if name in GATHERS:
            touched = 2 * outputs
        elif name in VIEWS or name == "Transpose":
            touched = []
        elif "SliceUpdate" in name:
            touched = 2 * inputs[1:2]  # in place
        moved += sum(math.prod(shape) * dtype.size for _, shape, dtype in touched)
    return moved


@pytest.mark.slow
@pytest.mark.real
def test_bytes_of_a_call(monkeypatch):
    """Of 6 nodes behind 128 tokens: the weights once, 8 of 30 layers again, and the draft head."""
    model, _ = load("smollm2-135m", adapter="chat", dtype="float32")
    drafter = StreamDrafter(model, TreeConfig(kind="best", size=6), 4, "second-pass")
    cache = model.make_cache(scratch_rows([drafter]))
    cache.reserve(more_tokens=136)
    model.backbone.append(mx.zeros((127,), mx.int32), cache)
    tail = last_tokens((), 0)
    first = plain_call(model, mx.array([5], mx.int32), tail, cache)
    tree = drafter.propose(first.verified, drafter.largest)
    fork = cache.fork(128)
    fork.reserve(more_tokens=1)
    mx.eval(first.arrays_to_read(), tree.arrays, cache.state, fork.state)

    def plain(token):
        return [*plain_call(model, token, tail, fork).arrays_to_read(), *fork.state]

    def verified_and_drafted(tokens):
        call = verify_tree(model, replace(tree, tokens=tokens), cache, tail=tail)
        drafted = drafter.propose(call.verified, drafter.largest)
        return [*call.arrays_to_read(), *drafted.arrays, *cache.state]

    monkeypatch.setattr(mx.fast, "rms_norm", as_one)
    monkeypatch.setattr(mx.fast, "rope", as_one)
    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", attention_as_one)
    least = bytes_moved(plain, mx.array([5], mx.int32))
    assert bytes_moved(verified_and_drafted, tree.tokens) <= 1.37 * least
    assert least <= 1.06 * sum(array.nbytes for array in module_arrays(model.backbone.model))
