"""perf.run.tasks: where the data of a task comes from, in a fresh checkout too."""

from __future__ import annotations

import argparse
import json

import pytest
from real import one_line

from perf import score
from perf.bench import __main__ as bench
from perf.compare import __main__ as compare
from perf.quality import __main__ as quality
from perf.run.tasks import TASKS, data_file, read_examples
from ssmlx.commands import calibrate
from ssmlx.errors import InputError
from ssmlx.prompts import as_messages, read_prompts

SHIPPED = [name for name, task in TASKS.items() if task.test]
COMMANDS = {
    "compare": (compare, ()),
    "quality": (quality, ("--adapter", "x")),
    "score": (score, ("good=x.jsonl",)),
}


@pytest.mark.parametrize("name", SHIPPED)
@pytest.mark.parametrize(("command", "more"), COMMANDS.values(), ids=COMMANDS)
def test_what_ships_is_asked_where_no_data_is_named(command, more, name):
    args = command.parse_args([*more, "--task", name])
    path = data_file(TASKS[name], None, args.data_dir)
    assert path.parts[-3:-1] == ("examples", "data") and "test" in path.name
    assert read_examples(path, TASKS[name], 2)


def test_a_folder_that_is_named_must_have_the_data(tmp_path):
    with pytest.raises(InputError, match=r"no data file .*test\.jsonl"):
        data_file(TASKS["sql"], None, tmp_path)
    with pytest.raises(InputError, match="no data ships for the task dialogsum"):
        data_file(TASKS["dialogsum"], None)


def test_answers_to_what_ships_are_scored(tmp_path, capsys):
    path = tmp_path / "answers.jsonl"
    path.write_bytes(TASKS["sql"].test.read_bytes())
    assert score.main(["--task", "sql", "--out", str(tmp_path), f"gold={path}"]) == 0
    result = json.loads((tmp_path / "score-sql.json").read_text())
    assert result["prompts"] == 100
    assert result["rows"][0]["figures"]["exact match"]["value"] == 100
    capsys.readouterr()
    assert score.main(["--task", "dialogsum", f"gold={path}"]) == 2
    assert "no data ships" in one_line(capsys.readouterr().err, "perf.score")


def test_prompts_to_calibrate_with_ship_with_every_adapter_and_are_not_the_chats_test():
    for name in SHIPPED:
        path = calibrate.prompts_of(argparse.Namespace(adapter=name, model=""))
        prompts = [turns_of(row) for row in read_prompts(path)]
        assert path.parent.name == name and len(prompts) == 34
        test = {turns_of(row) for row in read_prompts(TASKS[name].test)}
        assert name != "chat" or not test & set(prompts)


def turns_of(row) -> str:
    return json.dumps(as_messages(row))


def test_the_bench_asks_what_ships():
    assert [data_file(TASKS[part.task], part.data).name for part in bench.PARTS] == [
        "sql_test_100.jsonl",
        "chat_test.jsonl",
    ]
