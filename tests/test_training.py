"""What both trainers share: data, batches, draft vocabulary, replay, schedule, record."""

import json

import numpy as np
import pytest
from refusals import found_in, mentions, refusal
from tokenizers import processors

from ssmlx.commands.train_options import make_training_parser, read_train_config
from ssmlx.loading.folders import CONFIG_FILE
from ssmlx.prompts import TokensBetweenTurns
from ssmlx.training import data
from ssmlx.training.config import DRAFT_VOCAB_SIZE, TrainConfig
from ssmlx.training.record import LOG_FILE, Record, read_log_entries

from tiny import make_tokenizer  # isort: skip

END = 12


def example(*tokens: int, start: int) -> data.Example:
    return data.Example(np.array(tokens, np.int32), start)


def encoder(template: str | None = "w9 {prompt} w8", max_length: int = 50) -> data.Encoder:
    return data.Encoder(make_tokenizer(eos=END), template, END, max_length)


def write(path, *lines) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_each_form_of_line_gives_its_tokens(tmp_path):
    write(
        tmp_path / "train.jsonl",
        {"prompt": "w1 w2", "completion": "w3 w4"},
        {"text": "w5 w6 w7"},
        {"prompt_tokens": [1, 2], "completion_tokens": [3, END]},
        {"prompt": "w1", "completion": ""},  # the end token alone is an answer too
    )
    found = data.read_examples(tmp_path / "train.jsonl", encoder())
    assert [(e.tokens.tolist(), e.start) for e in found] == [
        ([9, 1, 2, 8, 3, 4, END], 4),
        ([5, 6, 7, END], 1),
        ([1, 2, 3, END], 2),
        ([9, 1, 8, END], 3),
    ]


def test_a_text_starts_as_decoding_starts_it():
    own = encoder()
    starts = processors.TemplateProcessing("w7 $A", special_tokens=[("w7", 7)])
    own.tokenizer._tokenizer.backend_tokenizer.post_processor = starts
    found = own.encode_row({"text": "w5 w6"})
    assert (found.tokens.tolist(), found.start) == ([7, 5, 6, END], 1)


def test_a_chat_is_learnt_under_the_models_template(tmp_path):
    tokenizer = make_tokenizer(eos=END)
    tokenizer._tokenizer.chat_template = (
        "{% for m in messages %}{{ 'w9 ' + m['content'] + ' ' }}{% endfor %}w8"
    )
    tokenizer.has_chat_template = True
    turns = [("user", "w1"), ("assistant", "w2"), ("user", "w3"), ("assistant", "w4 w5")]
    messages = [{"role": role, "content": content} for role, content in turns]
    write(tmp_path / "x.jsonl", {"messages": messages}, {"prompt": "w1", "completion": "w2"})
    own = data.Encoder(tokenizer, None, END, 50)
    found = data.read_examples(tmp_path / "x.jsonl", own)
    assert found[0].tokens.tolist() == [9, 1, 9, 2, 9, 3, 8, 4, 5, END]
    assert found[0].start == 7
    assert found[1].tokens.tolist() == [9, 1, 8, 2, END]
    refused = refusal(own.encode_row, {"messages": messages[:3]})
    assert mentions(found_in(refused), "messages")


def test_long_answers_are_cut_and_long_prompts_left_out(tmp_path):
    write(
        tmp_path / "x.jsonl",
        {"prompt": "w1", "completion": "w2 w3 w4 w5"},
        {"prompt": "w1 w1 w1 w1", "completion": "w2"},
    )
    (found,) = data.read_examples(tmp_path / "x.jsonl", encoder(max_length=5))
    assert found.tokens.tolist() == [9, 1, 8, 2, 3]


def test_a_chat_that_the_template_refuses_is_named(tmp_path):
    tokenizer = make_tokenizer(eos=END)
    tokenizer._tokenizer.chat_template = "{{ raise_exception('no chats') }}"
    tokenizer.has_chat_template = True
    write(tmp_path / "x.jsonl", {"text": "w1 w2"}, {"prompt": "w1", "completion": "w2"})
    asked = (tmp_path / "x.jsonl", data.Encoder(tokenizer, None, END, 50))
    line = refusal(data.read_examples, *asked)
    assert mentions(found_in(line), "x.jsonl", "2", "no chats") and line.count("x.jsonl") == 1


def test_answers_of_a_batch_start_in_one_column():
    batch = data.collate(
        [example(1, 2, 3, 4, END, start=2), example(5, 6, END, start=1)], np.arange(2)
    )
    assert batch.tokens.tolist() == [[1, 2, 3, 4, END], [0, 5, 6, END, 0]]
    assert batch.positions.tolist() == [[0, 1, 2, 3, 4], [0, 0, 1, 2, 3]]
    assert batch.anchors.tolist() == [[1, 2, 3], [1, 2, 0]]
    assert batch.targets(0).tolist() == [[3, 4, END], [6, END, -1]]
    assert batch.targets(1).tolist() == [[4, END, -1], [END, -1, -1]]
    assert batch.targets(3).tolist() == [[-1] * 3, [-1] * 3]


def test_a_row_sees_what_comes_before_it_but_no_padding():
    batch = data.collate([example(1, 2, 3, start=2), example(5, 6, start=1)], np.arange(2))
    assert batch.causal_visible[0].tolist() == np.tril(np.ones((3, 3), bool)).tolist()
    assert batch.causal_visible[1].tolist() == [
        [True, False, False],
        [False, True, False],
        [False, True, True],
    ]


def random_examples(count: int, seed: int = 0) -> list[data.Example]:
    rng = np.random.default_rng(seed)
    return [
        example(*rng.integers(0, 9, rng.integers(4, 30)), start=int(rng.integers(1, 4)))
        for _ in range(count)
    ]


def test_an_epoch_has_every_example_once_and_depends_on_the_seed_alone():
    examples = random_examples(101)
    first = data.draw_epoch_batches(examples, 8, seed=1, epoch=0)
    assert sorted(np.concatenate(first).tolist()) == list(range(101))
    again = data.draw_epoch_batches(examples, 8, seed=1, epoch=0)
    assert [b.tolist() for b in first] == [b.tolist() for b in again]
    other = data.draw_epoch_batches(examples, 8, seed=1, epoch=1)
    assert [b.tolist() for b in first] != [b.tolist() for b in other]


def test_buckets_save_padding():
    examples = random_examples(256)
    rows = sum(
        data.collate(examples, b).tokens.size for b in data.draw_epoch_batches(examples, 8, 0, 0)
    )
    real = sum(len(e.tokens) for e in examples)
    assert real <= rows < 1.35 * real


@pytest.mark.parametrize("packing", [None, data.Packing(60, TokensBetweenTurns(), 256)])
def test_a_plan_gives_any_step_without_those_before_it(packing):
    """Half of the batches are packed, the larger one."""
    examples = random_examples(20)
    walked = data.BatchPlan(examples, 8, 3, half_packing=packing)
    batches = [walked.batch(step).indices.tolist() for step in range(7)]
    assert (
        data.BatchPlan(examples, 8, 3, half_packing=packing).batch(5).indices.tolist() == batches[5]
    )
    assert sum(walked.batch(step).firsts is not None for step in range(6)) == (4 if packing else 0)
    assert sorted(index for batch in batches[3:6] for index in batch) == list(range(20))


def test_examples_become_turns_of_a_conversation():
    packing = data.Packing(21, TokensBetweenTurns((END, 2), (3, 4)), 8)
    texts = [
        example(3, 4, 5, 9, 6, END, start=4), example(1, 3, 4, 5, 9, 7, 8, start=5),
        example(8, 9, 5, END, start=2), example(3, 4, 5, 6, start=3),
    ]  # fmt: skip
    batch = data.collate(texts, np.arange(4), packing)
    # What was cut is closed; what is no turn under the template follows as it is.
    first = [3, 4, 5, 9, 6, END, 2, 3, 4, 5, 9, 7, 8, END, 2, 8, 9, 5, END]
    assert batch.tokens.tolist() == [first, [3, 4, 5, 6] + [0] * 15]
    assert batch.anchors.tolist() == [[3, 4, 10, 11, 16, 17], [2, 0, 1, 3, 4, 5]]
    assert batch.targets(0).tolist() == [[6, END, 7, 8, 5, END], [6] + [-1] * 5]
    assert batch.targets(1).tolist() == [[END, -1, 8, -1, END, -1], [-1] * 6]
    answers = [(row, places.start, a.tolist()) for row, places, a in batch.answers_with_anchors()]
    assert answers == [(0, 0, [6, END]), (0, 2, [7, 8]), (0, 4, [5, END]), (1, 0, [6])]
    assert (batch.causal_visible[0] == np.tril(np.ones((19, 19), bool))).all()
    seen = batch.stream_visible
    assert np.flatnonzero(seen[0, 3]).tolist() == [0, 1, 2, 3]
    assert np.flatnonzero(seen[0, 11]).tolist() == list(range(12))
    assert np.flatnonzero(seen[0, 17]).tolist() == [0, 1, 2, 3, 12, 13, 14, 15, 16, 17]
    assert batch.part_of_rank(1, 2).targets(0).tolist() == [[6]]


def test_no_examples_make_no_conversation():
    assert data.Packing(21, TokensBetweenTurns(), 8).pack([]) == []


def test_the_draft_vocabulary_is_the_most_frequent_answer_tokens():
    examples = [example(7, 7, 7, 3, 3, 5, start=3), example(8, 3, 9, 5, start=1)]
    assert data.choose_draft_vocab(examples, 2, 20).tolist() == [3, 5]
    assert data.choose_draft_vocab(examples, 4, 20).tolist() == [3, 5, 7, 9]
    assert data.choose_draft_vocab(examples, 6, 20).tolist() == [0, 3, 5, 7, 8, 9]
    assert len(data.choose_draft_vocab(examples, 50, 20)) == 20
    assert data.draft_vocab_coverage(examples, np.array([3, 5])) == pytest.approx(5 / 6)


def test_targets_become_places_in_the_draft_vocabulary():
    targets = np.array([[3, 9, -1], [4, 0, 20]])
    assert data.draft_vocab_indices(targets, np.array([0, 3, 9])).tolist() == [
        [1, 2, -1],
        [-1, 0, -1],
    ]
    assert data.draft_vocab_indices(targets, None).tolist() == targets.tolist()


def test_the_rate_rises_then_falls_to_nothing():
    config = TrainConfig(learning_rate=1.0, warmup=0.1)
    rates = [config.learning_rate_at(step, 100) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == pytest.approx(1.0)
    assert rates[99] == pytest.approx(1 / 90)
    assert max(rates) == pytest.approx(1.0)
    cosine = TrainConfig(learning_rate=1.0, warmup=0.0, schedule="cosine")
    assert cosine.learning_rate_at(50, 100) == pytest.approx(0.5, abs=0.01)


def test_settings_survive_json():
    config = TrainConfig(stream_weights=(0.1, 0.2), num_streams=2, lora_modules=("q_proj",))
    assert (
        TrainConfig.from_dict_ignoring_unknown(json.loads(json.dumps(config.to_dict()))) == config
    )
    assert config.alphas == (0.1, 0.2)
    assert TrainConfig(num_streams=3).alphas == (0.1, 0.1, 0.1)
    assert TrainConfig(num_streams=0).alphas == ()


@pytest.mark.parametrize(
    "changed",
    [
        {"num_streams": -1}, {"learning_rate": 1e38}, {"schedule": "step"},
        {"stream_weights": (0.1, 0.2)}, {"stream_design": "value_rotation", "rotation_step": 0.0},
        {"rotation_step": 0.1},
        {"stream_init": "residual", "stream_init_rank": 0},
        {"stream_init": "identity", "stream_init_rank": 4},
        {"num_streams": 0, "adapter_scope": "streams"}, {"warmup": 1.0},
    ],
)  # fmt: skip
def test_nonsense_settings_are_refused_by_their_option(changed):
    line = refusal(TrainConfig, **changed)
    assert any(mentions(line, f"--{name.replace('_', '-')}") for name in changed), line


LOW = ("low_rank", 32)
NONE = ("identity", 0)
OF_STREAMS = {"num_streams": 2, "stream_init": "identity", "stream_init_rank": 0}


@pytest.mark.parametrize(
    ("start", "given", "expected"),
    [
        ({}, "", LOW), ({}, "--stream-init-rank 8", ("low_rank", 8)),
        ({}, "--stream-init-rank 0", NONE), ({}, "--stream-init identity", NONE),
        ({}, "--stream-init residual", ("residual", 32)), ({}, "--num-streams 0", NONE),
        ({}, "--stream-design value_rotation --rotation-step 0.1", NONE), (OF_STREAMS, "", NONE),
        ({**OF_STREAMS, "num_streams": 0}, "", LOW),
        (OF_STREAMS, "--stream-init-rank 4", ("low_rank", 4)),
    ],
)  # fmt: skip
def test_f_follows_from_the_other_options_and_the_start(tmp_path, start, given, expected):
    (tmp_path / CONFIG_FILE).write_text(json.dumps(start))
    parser = make_training_parser("x.train", "Train.", "", "an adapter", "a LoRA")
    options = ["--data", "d", "--out", "o", "--init", str(tmp_path), *given.split()]
    train = read_train_config(parser.parse_args(options))
    assert (train.stream_init, train.stream_init_rank) == expected


def test_a_record_drops_what_was_not_saved(tmp_path):
    path = tmp_path / LOG_FILE
    record = Record(path)
    for step in (1, 2, 3):
        record.add({"step": step, "main_loss": 1.0 / step})
    with path.open("a") as file:
        file.write('{"step": 4, "main')
    assert [e["step"] for e in read_log_entries(path)] == [1, 2, 3]
    Record(path, step=2).add({"step": 3, "main_loss": 7.0})
    assert [e["main_loss"] for e in read_log_entries(path)] == [1.0, 0.5, 7.0]


def test_large_vocabularies_get_a_draft_vocabulary():
    assert TrainConfig().with_default_draft_vocab_size(32768).draft_vocab_size == DRAFT_VOCAB_SIZE
    assert TrainConfig().with_default_draft_vocab_size(32767).draft_vocab_size == 0
    assert TrainConfig(num_streams=0).with_default_draft_vocab_size(49152).draft_vocab_size == 0
    assert (
        TrainConfig(draft_vocab_size=0).with_default_draft_vocab_size(49152).draft_vocab_size == 0
    )
