"""Recipes of prompts: of the E2E task's form, none held out, the same for a seed; of chats."""

import hashlib
import itertools
import json
import random
import re
import shlex
from importlib import import_module

import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper
from real import snapshot, write_data
from refusals import exits, mentions, one_line, refusal

pytest.importorskip("torch")
from tiny_torch import greedy, make_model, make_tokenizer

from convert.training.run import TorchTrainer
from examples.recipes import chat_prompts, chat_streams, comparison, e2e_prompts
from examples.recipes.e2e_prompts import PROG, format_attributes, main, parse_attributes
from ssmlx.errors import InputError
from ssmlx.training import questions
from ssmlx.training.part_file import PartFile
from ssmlx.training.record import read_log_entries

TRAIN = [
    "name[Aromi], eatType[pub], area[riverside]",
    "name[Clowns], food[Fast food], near[Clare Hall]",
    "name[Aromi], eatType[coffee shop], customer rating[5 out of 5]",
    "name[Aromi], eatType[pub], area[riverside]",
]
HELD_OUT = "name[Clowns], eatType[pub], area[riverside]"


@pytest.fixture
def values(tmp_path, monkeypatch):
    """The file of more values, which has none."""
    file = tmp_path / "values.json"
    file.write_text("{}")
    monkeypatch.setattr(e2e_prompts, "VALUES", file)
    return file


@pytest.fixture
def task(tmp_path, values):
    folder = tmp_path / "task"
    folder.mkdir()
    for name, texts in (("train", TRAIN), ("valid", [HELD_OUT]), ("test", [TRAIN[1]])):
        lines = [json.dumps({"prompt": text, "completion": "It is."}) for text in texts]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    return folder


def made(task, out, *more):
    assert main(["--data", str(task), "--out", str(out), *more]) == 0
    return [json.loads(line)["prompt"] for line in out.read_text().splitlines()]


def test_new_prompts_recombine_the_known_ones(task, tmp_path):
    prompts = made(task, tmp_path / "out.jsonl", "--count", "100")
    assert prompts[:2] == [TRAIN[0], TRAIN[2]]  # its own, each once, and not the held-out one
    assert len(set(prompts)) == len(prompts)
    assert HELD_OUT not in prompts and TRAIN[1] not in prompts
    # All that 2 names, 2 kinds and the single other values allow, but for those that were there:
    # 2 x 2 of either of the first and third form, 2 of the second, less 2 own and 2 held out.
    assert len(prompts) == 4 + 4 + 2 - 2
    names = {tuple(name for name, _ in parse_attributes(text)) for text in prompts}
    assert names == {tuple(name for name, _ in parse_attributes(text)) for text in TRAIN}


def test_a_seed_gives_the_same_prompts(task, tmp_path):
    first, second, other = (
        made(task, tmp_path / name, "--count", "3", "--seed", seed)
        for name, seed in (("a", "1"), ("b", "1"), ("c", "2"))
    )
    assert first == second != other


@pytest.mark.parametrize("text", ["What is it?", "name[Aromi] area[x]", "name[Aromi], and", ""])
def test_other_texts_are_refused(text):
    with pytest.raises(InputError):
        parse_attributes(text)
    assert format_attributes(parse_attributes(TRAIN[1])) == TRAIN[1]


def test_bad_input_is_one_line(task, tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    line = exits(capsys, main, "--data", task, "--out", out, "--count", "0")
    assert mentions(line, "--count", "0")
    (task / "train.jsonl").write_text(json.dumps({"prompt": "Who are you?"}))
    assert main(["--data", str(task), "--out", str(out)]) == 2
    assert "Who are you?" in one_line(capsys.readouterr().err, PROG)
    assert not out.exists()


def test_more_values_come_half_of_the_time_and_never_a_held_out_name(task, values, tmp_path):
    (task / "test.jsonl").write_text(json.dumps({"prompt": "name[Zizzi], food[Thai]"}))
    names = [f"House {index}" for index in range(50)]
    values.write_text(json.dumps({"name": [*names, "Zizzi"], "food": ["Thai"]}))
    prompts = made(task, tmp_path / "out.jsonl", "--count", "200")
    pairs = [pair for text in prompts for pair in parse_attributes(text)]
    assert ("food", "Thai") in pairs  # held out as a prompt's part, but not as a name
    assert ("name", "Zizzi") not in pairs
    assert len({value for name, value in pairs if name == "name"} & set(names)) > 30
    assert any(pair == ("name", "Aromi") for pair in pairs)  # and the known ones still


def test_splits_share_no_hand_written_prompt_and_no_list_item():
    lists = questions.split_question_lists()
    written = questions.draw_shipped_prompts(0)
    assert written == questions.draw_shipped_prompts(0)
    text = "\n".join(written["train"]).encode()
    assert hashlib.blake2b(text, digest_size=8).hexdigest() == "b5dd4f46a5f2fe90"
    other = questions.draw_shipped_prompts(1)["train"]
    assert other != written["train"]
    assert not {*map(questions.normalise_prompt, other)} & {
        *map(questions.normalise_prompt, written["test"])
    }
    for one, other in (("train", "valid"), ("train", "test"), ("valid", "test")):
        texts = [set(map(questions.normalise_prompt, written[split])) for split in (one, other)]
        assert not texts[0] & texts[1]
        for name in questions.read_question_lists():
            assert not set(lists[one][name]) & set(lists[other][name])
    for split, texts in written.items():
        assert len(texts) == questions.WRITTEN[split]
        assert not [text for text in texts if "{" in text.replace("{}", "") and "}" in text]


def test_lists_that_run_out_say_so():
    lists = {"templates": ["Hi."], "plain": ["a b"]}
    line = refusal(questions.draw_prompts, lists, 3, random.Random(0))
    assert mentions(line, "2", "3")


def test_a_prompt_that_stands_alone():
    assert questions.is_good_prompt("How do I cook rice?")
    for text in ("Hi", "a" * 401, "Что такое гравитация, скажите?", "go go go go go go go go"):
        assert not questions.is_good_prompt(text)
    assert not questions.is_good_prompt("What is this <|im_start|> here?")
    assert questions.normalise_prompt("  What's UP?! ") == questions.normalise_prompt("what s up")


def test_the_model_continues_its_templates_user_turn():
    tokenizer = make_tokenizer()
    assert tokenizer.decode(questions.user_turn_prefix(tokenizer)).split() == ["<s>", "user", ":"]


@pytest.mark.slow  # a random model seldom writes a good prompt
def test_sampled_prompts_are_new_each_time():
    model = make_model()
    tokenizer = make_tokenizer()
    draw = {"batch_size": 32, "seed": 1}
    found = chat_prompts.sample_user_turns(model, tokenizer, 6, **draw)
    assert len({questions.normalise_prompt(text) for text in found}) == 6
    assert found == chat_prompts.sample_user_turns(model, tokenizer, 6, **draw)


def test_sampled_prompts_are_kept_for_their_model(tmp_path, monkeypatch):
    texts = iter(("text 1", "text 2"))
    monkeypatch.setattr(chat_prompts, "sample_user_turns", lambda *_, **__: [next(texts)])
    asked = [chat_prompts.parse_args(["--out", str(tmp_path), "--model", name]) for name in "aba"]
    found = [chat_prompts._sampled_prompts(args, None, None)[0][-1] for args in asked]
    assert found == ["1", "2", "1"]


def test_sampled_prompts_go_to_one_split_each(monkeypatch):
    counts = chat_prompts.Counts(sampled=2, two_turn=0)
    monkeypatch.setattr(chat_prompts, "COUNTS", dict.fromkeys(questions.SPLITS, counts))
    start = "one two three four five six seven eight"
    found = ["known text", f"{start} nine", f"{start} ten", *(f"text {n}" for n in range(5))]
    splits = chat_prompts.split_without_near_copies(found, {"train": ["Known text!"]})
    assert splits["test"] == [f"{start} nine", "text 0"]
    assert splits["train"] == ["text 3", "text 4"]
    line = refusal(chat_prompts.split_without_near_copies, found[:6], {"train": []})
    assert mentions(line, "5", "6")


def test_two_turn_chats_hold_the_models_own_answer():
    model = make_model()
    tokenizer = TokenizerWrapper(make_tokenizer())
    chats = chat_prompts.make_two_turn_chats(model, tokenizer, ["w1", "w2 w3"], ["w5", "w6"], 1)
    prefix = tokenizer.apply_chat_template(
        [{"role": "user", "content": "w2 w3"}], add_generation_prompt=True, return_dict=False
    )
    said = tokenizer.decode(greedy(model, list(prefix), 40, {2}), skip_special_tokens=True)
    roles = [turn["role"] for turn in chats[1]["messages"]]
    assert roles == ["user", "assistant", "user"]
    assert chats[1]["messages"][1]["content"].startswith(said)
    assert chats[1]["messages"][2]["content"] == "w6"


def test_a_cut_answer_ends_with_a_sentence():
    assert chat_prompts.cut_to_whole_sentences("One. Two costs 3.5 and") == "One."
    assert chat_prompts.cut_to_whole_sentences("- one\n- two\n- thr") == "- one\n- two"
    assert chat_prompts.cut_to_whole_sentences("no end") == "no end"


def stopping(real, every, calls):
    def stopped(*args):
        if next(calls) % every == 0:
            raise KeyboardInterrupt
        return real(*args)

    return stopped


@pytest.mark.long
def test_a_comparison_is_made_again_however_often_it_stops(
    base, adapter, tmp_path, monkeypatch, capsys
):
    """Steps in this process, stopped by every so many-th batch of answers or of training."""
    text = comparison.MANIFEST.read_text().replace("smollm2-135m-q4_1", str(base))
    text = text.replace("examples/adapters/e2e", str(adapter))
    for option, value in (("draft-vocab-size", 9), ("batch-size", 8)):
        text = re.sub(rf"--{option} \d+", f"--{option} {value}", text)
    manifest = json.loads(text.replace("--template", "--save-every 1 --device cpu --template"))
    manifest["files"] |= {name: None for name in manifest["files"] if name.startswith("DATA/")}
    monkeypatch.setattr(comparison, "MANIFEST", tmp_path / "comparison.json")
    comparison.MANIFEST.write_text(json.dumps(manifest))
    rows = [{"prompt": f"name[{i}], food[{i % 7}]", "completion": "w1 w2"} for i in range(40)]
    data = tmp_path / "data"
    (write_data(data / "e2e", rows) / "test.jsonl").write_text(json.dumps(rows[0]))
    made = []
    stops = 0
    calls = itertools.count(1)
    for every in (10**6, 3):
        out = tmp_path / str(every)
        argv = ["--data-dir", str(data), "--out", str(out), "--max-steps", "2", "--only", "e2e"]
        assert comparison.main([*argv, "--only", "e2e/prompts"]) == 0  # in a process of its own
        with monkeypatch.context() as patch:
            patch.setattr(
                comparison, "run_module", lambda words: import_module(words[0]).main(words[1:])
            )
            for owner, name in ((TorchTrainer, "advance"), (PartFile, "append")):
                patch.setattr(owner, name, stopping(getattr(owner, name), every, calls))
            while code := comparison.main(argv):
                stops += 1
                assert code == 130 and stops < 30
        files = snapshot(out)
        made.append({name: files[name] for name in files if re.search(r"tensors$|n\.json", name)})
        for log in out.rglob("log.jsonl"):
            assert [entry["step"] for entry in read_log_entries(log)] == [1, 2]
    assert made[0] == made[1] and stops > 4
    told = json.loads(files["comparison.json"])
    assert all(one["finished"] is one["name"].startswith("e2e/") for one in told["steps"])
    digest = hashlib.sha256(files["e2e/own/train.jsonl"]).hexdigest()
    assert told["files"]["OUT/e2e/own/train.jsonl"] == digest
    monkeypatch.setattr(comparison, "run_module", None)  # nothing is taken again
    assert comparison.main(argv) == 0 and comparison.main([*argv, "--max-steps", "3"]) == 2
    for changed in (out / "e2e/own/train.jsonl", data / "e2e/train.jsonl"):
        changed.write_text(changed.read_text() + "\n")
        capsys.readouterr()
        assert comparison.main(argv) == 2
        line = one_line(capsys.readouterr().err, comparison.PROG)
        assert str(changed) in line and "null" in line


def test_the_manifest_of_the_comparison_holds():
    manifest = json.loads(comparison.MANIFEST.read_text())
    steps = [comparison.Step(**one) for one in manifest["steps"]]
    made = []
    read = {name for step in steps for name in step.input_files()}  # by each command's own parser
    assert read <= {*manifest["files"]} and len({step.name for step in steps}) == len(steps)
    for name, digest in manifest["files"].items():
        if (path := comparison.ROOT / name).is_file():
            assert hashlib.sha256(path.read_bytes()).hexdigest() == digest
        else:
            assert name in read and (digest or name.startswith("OUT/"))
    for step in steps:
        words = shlex.split(step.command)
        made.append(words[words.index("--out") + 1])
        for word in (word for word in words if word.startswith("OUT/")):
            assert any(one.startswith(word) or word.startswith(one) for one in made)
    comparison.check_equal_training(steps)
    steps[-3].command += " --epochs 9"
    assert mentions(refusal(comparison.check_equal_training, steps), "epochs", "9.0")


def test_answers_and_then_streams_are_made_in_minutes(tmp_path, monkeypatch, capsys):
    """At a thousandth of its size; what a cut run leaves is what it goes on from."""
    model = tmp_path / "model"
    make_model().save_pretrained(model)
    make_tokenizer().save_pretrained(model)
    held_out = tmp_path / "held.jsonl"
    held_out.write_text("".join(json.dumps({"prompt": f"w{n} w{n + 1}"}) + "\n" for n in range(5)))
    texts = [f"w{a} w{b}" for a in range(3, 9) for b in range(3, 9)]
    monkeypatch.setattr(chat_streams, "HELD_OUT", [held_out])
    monkeypatch.setattr(chat_streams, "TASKS", ("w1 {sentence}",))
    monkeypatch.setattr(chat_streams, "FILE_TOKENS", 400)
    monkeypatch.setattr(chat_streams, "draw_shipped_prompts", lambda seed: {"train": texts})
    monkeypatch.setattr(
        chat_streams,
        "sample_user_turns",
        lambda *_, seed, **__: [f"w7 w{seed % 20} w{n}" for n in range(6)],
    )
    common = ["--model", str(model), "--device", "cpu", "--dtype", "float32", "--batch-size", "8"]
    made = tmp_path / "answers"
    for tokens in ("60", "700"):
        argv = ["--out", str(made), "--tokens", tokens, "--max-tokens", "9", *common]
        assert chat_streams.main(argv) == 0
        assert re.search(r"\d", capsys.readouterr().err)  # how fast it is
    files = sorted(made.glob("answers-*.npz"))
    answers = [one for path in files for one in chat_streams.unpack(path)]
    assert len(files) > 1 and sum(len(one.answer) for one in answers) >= 700
    ours = make_model()
    greedy_ones = answers[:6]  # the first batch is not sampled
    assert all(one.answer == greedy(ours, one.prompt, 9, {2}) for one in greedy_ones)
    held = [one.prompt for one in chat_streams.unpack(made / "valid.npz")]
    assert len(held) == 5 and not [one for one in answers if one.prompt in held]

    monkeypatch.setattr(chat_streams, "PIECE_BYTES", 5000)
    out = tmp_path / "run"
    small = ["--epochs", "1", "--", "--num-streams", "2", "--num-msa-layers", "1",
             "--lora-rank", "2", "--root-init-rank", "4"]  # fmt: skip
    work = tmp_path / "work"
    argv = ["--out", str(out), "--work", str(work), "--answers", str(made), *common, *small]
    with monkeypatch.context() as patch:
        stopped = stopping(TorchTrainer.advance, 9, itertools.count(1))
        patch.setattr(TorchTrainer, "advance", stopped)
        assert chat_streams.main(argv) == 130
    assert chat_streams.main(argv) == 0
    assert re.search(r"\d", capsys.readouterr().err)  # how fast it is
    steps = json.loads((work / "plan.json").read_text())["steps"]
    assert [one["step"] for one in read_log_entries(out / "log.jsonl")] == [*range(1, steps + 1)]
    pieces = sorted(out.glob("state-*"), key=lambda path: int(path.name.split("-")[1]))
    assert len(pieces) > 1
    whole = b"".join(path.read_bytes() for path in pieces)
    assert whole == (work / "run/state.pt").read_bytes()
    assert json.loads((out / "streams_config.json").read_text())["starts_without_root"]
    given = ("--out", out, "--answers", tmp_path, *common)
    assert str(tmp_path) in exits(capsys, chat_streams.main, *given)
