"""Adapters that were made here are found by the weights of their base, and by nothing else."""

import errno
import io
import json
import os
import shutil
import sys
import time

import mlx.core as mx
import pytest
from huggingface_hub.utils import enable_progress_bars
from mlx_lm.utils import load_model, save_model
from real import answer, on_a_terminal, snapshot, words, write_base, write_tiny_adapter
from refusals import as_shown, exit_code, exits, found_in, mentions, one_line, refusal

import ssmlx
from ssmlx import bars
from ssmlx.blas import this_machine
from ssmlx.commands import adapt, adapters, chat, check, drafting, generate
from ssmlx.errors import naming_file
from ssmlx.generation.plan import make_plan
from ssmlx.loading import identity, names
from ssmlx.loading.adapt_runs import PAYS, find_runs_by_weights, read_adapt_runs
from ssmlx.loading.attach import find_default_adapter
from ssmlx.loading.files import locked_folder, write_whole
from ssmlx.loading.folders import adapters_home
from ssmlx.loading.identity import folder_digest, stored_weights_digest
from ssmlx.loading.names import ADAPTER_LOG, resolve_adapter
from ssmlx.training import sizing

LENGTH = 8
CURVE = {"2": 1.5, "4": 2.0}


@pytest.fixture(autouse=True)
def nothing_ships(monkeypatch, tmp_path):
    monkeypatch.setattr(names, "ADAPTERS_FOLDERS", (tmp_path / "shelf",))
    monkeypatch.chdir(tmp_path)


def make_run(model, name="mine", *, figures=None, rounds=1, **settings):
    """What `ssmlx.adapt` leaves of a model in a folder, finished if there are figures."""
    folder = adapters_home() / name
    write_tiny_adapter(folder / "adapter", model, scope="streams")
    plan = {
        "settings": {"weights": stored_weights_digest(model), "seed": 0, **settings},
        "base": {"model": str(model), "folder": str(model.resolve())},
        "step_costs": {"2": 1.2, "4": 1.25},
        "rounds": [{"hours": 1.0 + n} for n in range(rounds)],
    }
    (folder / "plan.json").write_text(json.dumps(plan))
    if figures is not None:
        machine = {"machine": ", ".join(this_machine())}
        told = {**machine, "tokens_per_call": CURVE, "text_speed_up": 1.0, **figures}
        content = json.dumps({"rounds": rounds, "figures": told})
        (folder / "adapter" / "figures.json").write_text(content)
    return folder / "adapter"


def change_config(folder, **fields):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def lora_fused(base, target):
    """A copy whose attention was fine-tuned by LoRA: its sizes and norms are the base's."""
    shutil.copytree(base, target)
    model, _ = load_model(base)
    for layer in model.layers:
        a, b = (
            0.05 * mx.random.normal(shape, key=mx.random.key(1)) for shape in ((32, 2), (2, 32))
        )
        layer.self_attn.q_proj.weight = layer.self_attn.q_proj.weight + a @ b
    save_model(target, model)
    return target


# --- what is found ---


def test_it_is_found_in_a_copy_and_in_every_type_and_not_for_other_weights(base, tmp_path):
    folder = make_run(base)
    copy = shutil.copytree(base, tmp_path / "copy")
    change_config(copy, a_new_field=1)
    tuned = lora_fused(base, tmp_path / "tuned")
    for model, dtype, expected in (
        (base, "float32", folder),
        (base, "float16", folder),
        (copy, "stored", folder),
        (tuned, "float32", None),
    ):
        found = find_default_adapter(ssmlx.load(model, adapter="none", dtype=dtype)[0])
        assert (found and found[1]) == expected
    # By its name it is to be had all the same: it fits.
    assert ssmlx.load(tuned, adapter="mine", dtype="float32")[0].num_streams > 0
    shutil.rmtree(copy)
    moved = shutil.move(shutil.copytree(base, tmp_path / "a"), tmp_path / "b")
    assert [run.name for run in find_runs_by_weights(moved, "b").fitting] == ["mine"]


def test_other_weights_in_the_same_folder_are_told_in_a_line(base, tmp_path, caplog):
    model = shutil.copytree(base, tmp_path / "model")
    make_run(model)
    shutil.rmtree(model)
    lora_fused(base, model)
    with caplog.at_level("INFO", logger="ssmlx"):
        assert ssmlx.load(model, dtype="float32")[0].num_streams == 0
    (line,) = [one.getMessage() for one in caplog.records if "mine" in one.getMessage()]
    assert mentions(line, "--adapter mine")
    caplog.clear()
    with caplog.at_level("INFO", logger="ssmlx"):  # nor is it told where none is looked for
        ssmlx.load(model, adapter="none", dtype="float32")
    assert not caplog.records
    assert ssmlx.load(model, adapter="mine", dtype="float32")[0].num_streams > 0


def test_a_run_of_an_earlier_version_is_not_taken_by_itself(base, caplog, capsys):
    path = make_run(base).parent / "plan.json"
    plan = json.loads(path.read_text())
    plan["settings"]["weights"] = "0f" * 16  # a digest of samples
    path.write_text(json.dumps(plan))
    with caplog.at_level("INFO", logger="ssmlx"):
        model = ssmlx.load(base, dtype="float32")[0]
    (line,) = [one.getMessage() for one in caplog.records if "mine" in one.getMessage()]
    assert model.num_streams == 0
    assert mentions(line, "--adapter mine")
    assert exit_code(adapters.main) == 0
    assert str(base) in capsys.readouterr().out
    assert ssmlx.load(base, adapter="mine", dtype="float32")[0].num_streams > 0


def test_weights_are_read_only_where_a_run_is_of_their_shapes(base, tmp_path, monkeypatch):
    make_run(write_base(tmp_path / "other", layers=5))
    read = []
    real = identity._sha256_of_stored
    monkeypatch.setattr(
        identity, "_sha256_of_stored", lambda one: read.append(one.name) or real(one)
    )
    assert find_runs_by_weights(base, str(base)).fitting == () and read == []
    make_run(write_base(tmp_path / "like", seed=1), "like")
    read.clear()
    assert find_runs_by_weights(base, str(base)).fitting == () and read


def test_the_newest_that_pays_here_is_taken(base, monkeypatch):
    plain = ssmlx.load(base, adapter="none", dtype="float32")[0]
    assert find_default_adapter(plain) is None
    for number, (name, figures) in enumerate(
        {"old": None, "slow": {"speed_up": PAYS - 0.01}, "elsewhere": None}.items()
    ):
        path = make_run(base, name, figures=figures) / "streams_config.json"
        os.utime(path, (number, number))
    assert [run.name for run in read_adapt_runs()] == ["elsewhere", "slow", "old"]
    assert find_default_adapter(plain)[0] == "elsewhere"
    shutil.rmtree(adapters_home() / "elsewhere")
    assert find_default_adapter(plain)[0] == "old"
    # Nor is it taken where the text alone drafts as fast.
    make_run(base, "copied", figures={"speed_up": 1.2, "text_speed_up": 1.2})
    assert find_default_adapter(plain)[0] == "old"
    # What was measured on another machine decides nothing here.
    make_run(base, "moved", figures={"speed_up": 0.5, "machine": "another"})
    assert find_default_adapter(plain)[0] == "moved"
    shutil.rmtree(adapters_home())
    # For the model with a LoRA on it, streams have learned other answers.
    make_run(base, "tuned", adapter=["0f"])
    assert find_default_adapter(plain) is None and resolve_adapter("tuned").is_dir()


def test_what_is_broken_is_none(base):
    plain = ssmlx.load(base, adapter="none", dtype="float32")[0]
    folder = make_run(base)
    plan = folder.parent / "plan.json"
    whole = plan.read_text()
    for broken in (
        "{",
        "[]",
        "{}",
        whole.replace('"base"', '"bases"'),
        whole.replace("1.0", '"x"'),
    ):
        plan.write_text(broken)
        assert find_default_adapter(plain) is None and read_adapt_runs() == []
    plan.write_text(whole)
    machine = ", ".join(this_machine())
    for broken in (
        "{",
        "[]",
        json.dumps({"rounds": 1, "figures": {"machine": machine}}),
        json.dumps({"figures": [1]}),
    ):
        (folder / "figures.json").write_text(broken)
        assert find_default_adapter(plain) is None
    (folder / "figures.json").unlink()
    assert find_default_adapter(plain) is not None


def test_load_engine_and_commands_find_it_as_the_chat_does(base, monkeypatch, capsys):
    make_run(base, figures={"speed_up": 1.5})
    model, tokenizer = ssmlx.load(base, dtype="float32")
    assert model.num_streams > 0
    assert ssmlx.load(base, adapter="none", dtype="float32")[0].num_streams == 0
    assert ssmlx.swap_adapter(model, "auto").num_streams > 0
    prompt = ssmlx.prompt_tokens(words(3), model, tokenizer)
    expected, _ = answer(model, tokenizer, prompt, max_tokens=LENGTH, decoding="plain")
    with ssmlx.Engine(str(base), dtype="float32") as engine:
        assert engine.default_adapter == "mine"
        for adapter, drafts in ((None, True), ("auto", True), ("none", False)):
            assert (engine.model(adapter).num_streams > 0) == drafts
            answered = engine.stream(words(3), adapter=adapter, max_tokens=LENGTH)
            assert [token for one in answered for token in one.tokens] == expected
        assert engine.model("auto") is engine.model("mine")
    with ssmlx.Engine(str(base), ["none"], dtype="float32") as engine:
        assert engine.default_adapter == "none" and engine.model().num_streams == 0
        assert engine.model("auto").num_streams > 0
    told = {}
    given = ("--model", base, "--dtype", "float32", "--max-tokens", LENGTH)
    for adapter in ((), ("--adapter", "auto"), ("--adapter", "none")):
        assert exit_code(generate.main, *given, *adapter, "--prompt", words(3), "--verbose") == 0
        out, err = capsys.readouterr()
        told[adapter] = err.splitlines()[:2]
        assert tokenizer.encode(out.strip()) == [one for one in expected if one != 2]
    auto = told[()]
    assert mentions(auto[0], "mine", "1.50") and "python -m ssmlx.adapt" in auto[1]
    again = told["--adapter", "auto"]  # with costs that the first answer has taught
    assert again[1] == auto[1] and again[0].partition(": ")[0] == auto[0].partition(": ")[0]
    first, second = told["--adapter", "none"]
    assert not mentions(first, "mine") and mentions(second, "--adapter mine", "1.50")


def test_what_is_taken_by_default_is_said_once_in_the_log(base, tmp_path, caplog, capsys):
    """An app hears of it from `load` and `Engine`; the commands say it in words of their own."""

    def said(act):
        caplog.clear()
        with caplog.at_level("INFO", logger="ssmlx"):
            act()
        return [one.getMessage() for one in caplog.records if one.name == ADAPTER_LOG]

    assert all(mentions(line, str(base)) for line in said(lambda: ssmlx.load(base)))
    write_tiny_adapter(tmp_path / "shelf" / "chat", base, scope="streams")
    (line,) = said(lambda: ssmlx.load(base))
    assert mentions(line, str(base), "chat", "none")
    make_run(base)
    (line,) = said(lambda: ssmlx.load(base))
    assert mentions(line, str(base), "mine", "none")
    assert said(lambda: ssmlx.load(base, adapter="chat")) == []
    assert said(lambda: ssmlx.load(base, adapter=None)) == []
    with ssmlx.Engine(str(base)) as engine:
        assert len(said(lambda: (engine.default_adapter, engine.model(), engine.model()))) == 1
    capsys.readouterr()
    asked = ("--model", base, "--prompt", words(3), "--max-tokens", 2)
    assert exit_code(generate.main, *asked) == 0
    assert not mentions(capsys.readouterr().err, "mine")


def test_a_model_s_folder_of_that_name_is_no_adapter(base, tmp_path):
    made = make_run(base, "q4")
    shutil.copytree(base, tmp_path / "q4")  # in the working directory
    assert resolve_adapter("q4") == made
    assert ssmlx.load("q4", adapter="q4", dtype="float32")[0].num_streams > 0
    assert resolve_adapter("./q4") == (tmp_path / "q4").relative_to(tmp_path)
    # An adapter's folder is; and where nothing else has the name, it is told what is wrong.
    other = write_tiny_adapter(tmp_path / "mine", base)
    make_run(base, "mine")
    assert resolve_adapter("mine").resolve() == other
    (tmp_path / "empty").mkdir()
    assert "streams_config.json" in refusal(ssmlx.load, base, adapter="empty")


# --- the two lines ---


def lines_of(model, adapter, **settings):
    plan = make_plan(model, ssmlx.GenerateConfig(**settings))
    return drafting.describe(model, plan, adapter).lines()


def test_the_two_lines_follow_from_what_is_here(base, monkeypatch):
    plain = ssmlx.load(base, adapter="none", dtype="float32")[0]
    adapt = f"python -m ssmlx.adapt --model {base}"
    first, second = lines_of(plain, "none")
    assert as_shown(drafting.decision(make_plan(plain))) in first and adapt in second
    # By what rows alone cost, which a chat times: a pass of one of four layers comes to them.
    costs = sizing.learned_of(plain)[0].costs
    costs.set_head_start({("rows", 4): 1.1})
    usual = 1 + sizing.candidate_layers(4)[1] * (sizing._USUAL_TOKENS[4] - 1)
    second_pass = costs.frozen(0).calls(("rows", 5)) / 4 + 0.05
    assert sizing.forecast_speedup_of_adapting(plain) == pytest.approx(usual / (1.1 + second_pass))
    # Once calls with untrained streams were timed, by these.
    costs.set_head_start({("untrained streams in 1 layers", 4): 1.1})
    second = lines_of(plain, "none")[1]
    assert adapt in second and mentions(second, f"{usual / 1.1:.1f}")
    # What was begun, and has written an adapter.
    folder = make_run(base)
    settings = json.loads((folder / "streams_config.json").read_text())
    told = {**settings, "tokens_per_call": {"2": 1.5, "4": 2.0}}
    (folder / "streams_config.json").write_text(json.dumps(told))
    assert mentions(lines_of(plain, "none")[1], "--adapter mine")
    drafting_model = ssmlx.load(base, dtype="float32")[0]
    first, second = lines_of(drafting_model, "mine")
    assert mentions(first, "mine") and mentions(second, f"{adapt} --name mine", "1.60")
    # It brought nothing here.
    shutil.rmtree(adapters_home())
    make_run(base, figures={"speed_up": 0.99}, rounds=2)
    assert ssmlx.load(base, dtype="float32")[0].num_streams == 0
    first, second = lines_of(plain, "none")
    assert mentions(first, "mine", "0.99") and mentions(second, f"{adapt} --hours 4")
    first, _ = lines_of(drafting_model, "mine")
    assert mentions(first, "mine", "0.99")


def test_the_lines_of_what_ships_and_of_what_cannot_draft(base, tmp_path):
    from tiny_adapt import write_family

    plain = ssmlx.load(base, adapter="none", dtype="float32")[0]
    write_tiny_adapter(tmp_path / "shelf" / "chat", base, scope="streams")
    make_run(base, figures={"speed_up": 0.9})  # which is left aside
    assert ssmlx.load(base, dtype="float32")[0].num_streams > 0
    assert mentions(lines_of(plain, "none")[1], "--adapter chat")
    model = ssmlx.load(base, dtype="float32")[0]
    first, second = lines_of(model, "chat")
    assert mentions(first, "chat", "streams")
    assert f"python -m ssmlx.adapt --model {base} --data FILE" in second
    assert mentions(lines_of(model, "elsewhere")[0], "elsewhere")
    assert mentions(lines_of(model, None)[0], "model's")
    recurrent = ssmlx.load(write_family(tmp_path / "lfm2", "lfm2"))[0]
    first, second = lines_of(recurrent, "none")
    assert as_shown(drafting.decision(make_plan(recurrent))) in first
    assert as_shown(recurrent.backbone.capabilities.stages) in second


def test_the_lines_of_a_model_that_a_lora_tunes(base, tmp_path):
    from tiny_lora import write_lora

    make_run(base, figures={"speed_up": 1.5})  # for the base, which answers otherwise
    lora = write_lora(tmp_path / "lora", base)
    model = ssmlx.load(base, adapter=lora, dtype="float32")[0]
    first, second = lines_of(model, str(lora))
    assert mentions(first, str(lora))
    adapt = f"python -m ssmlx.adapt --model {base} --adapter {lora}"
    assert adapt in second
    make_run(base, "tuned", figures={"speed_up": 1.5}, adapter=[folder_digest(lora)])
    assert mentions(lines_of(model, str(lora))[1], "--adapter tuned", "1.50")
    task = write_tiny_adapter(tmp_path / "task", base)  # LoRA and streams
    model = ssmlx.load(base, adapter=task, dtype="float32")[0]
    assert "--" not in lines_of(model, str(task))[1], "nothing here is faster and answers alike"
    assert mentions(lines_of(model, "tuned")[0], "tuned", "1.50")


@pytest.mark.slow
def test_chat_check_and_server_say_them_alike(base, monkeypatch, capsys):
    pytest.importorskip("uvicorn")
    from ssmlx.server import __main__ as server

    make_run(base, figures={"speed_up": 1.5})
    monkeypatch.setattr("uvicorn.Server.run", lambda self, sockets: None)
    monkeypatch.setattr(check, "time_unknown_costs", lambda *_: None)
    for command in (chat, server):
        monkeypatch.setattr(command, "time_unknown_costs", lambda *_: None)
    monkeypatch.setattr(check, "time_tree_sizes", lambda *_: [])
    given = ("--model", base, "--dtype", "float32")
    told = {}
    for option in ((), ("--adapter", "none")):
        for command, more in ((chat, ()), (check, ()), (server, ("--port", 0))):
            monkeypatch.setattr(sys, "stdin", io.StringIO(""))
            assert exit_code(command.main, *given, *more, *option) == 0
            lines = "".join(capsys.readouterr()).splitlines()
            told[command.PROG, option] = lines
    for option in ((), ("--adapter", "none")):
        texts = [told[command.PROG, option] for command in (chat, check, server)]
        (faster,) = [line for line in texts[0] if line and all(line in text for text in texts)]
        assert "python -m ssmlx.adapt" in faster or mentions(faster, "--adapter mine")
        for text in texts:
            sources = [line for line in text if line != faster]
            assert any(mentions(line, "mine") for line in sources) == (option == ())
    assert server.served_adapters("m", ["none", "sql"]) == {"m": "none", "m:sql": "sql"}
    assert server.served_adapters("m", ["auto"]) == server.served_adapters("m", []) == {"m": None}
    line = refusal(server.served_adapters, "m", ["none", "auto"])
    assert mentions(found_in(line), "--adapter none", "--adapter auto")


@pytest.mark.slow
def test_check_times_what_a_model_s_own_streams_would_cost(base, capsys):
    given = ("--model", base, "--dtype", "float32", "--seconds", 0.05)
    assert exit_code(check.main, *given, "--json") == 0
    told = json.loads(capsys.readouterr().out)["drafting"]
    assert "plain decoding" in told[1] or "python -m ssmlx.adapt" in told[1]
    plain = ssmlx.load(base, adapter="none", dtype="float32")[0]
    assert sizing.forecast_speedup_of_adapting(plain) > 0
    assert lines_of(plain, "none")[1] == told[1]  # from then on


# --- python -m ssmlx.adapters ---


def test_adapters_are_listed_renamed_and_removed(base, tmp_path, capsys):
    def run(*argv):
        code = exit_code(adapters.main, *argv)
        return code, *capsys.readouterr()

    code, out, err = run()
    assert (code, err) == (0, "") and mentions(out, str(adapters_home()), "0")
    make_run(base, "done", figures={"speed_up": 1.5})
    gone = write_base(tmp_path / "gone", seed=1)
    make_run(gone, "begun")
    shutil.rmtree(gone)
    lora_fused(base, tmp_path / "changed")
    run_of = make_run(base, "changed", adapter=["0f"]).parent
    plan = json.loads((run_of / "plan.json").read_text())
    plan["base"]["folder"] = str(tmp_path / "changed")
    (run_of / "plan.json").write_text(json.dumps(plan))
    code, out, _ = run("list")
    lines = {line.split("  ")[0]: line for line in out.splitlines()}
    assert code == 0 and len(lines) == 4
    assert mentions(lines["done"], str(base), "2.00", "4", "1.50")
    assert time.strftime("%Y-%m-%d") in lines["done"]
    assert str(gone) in lines["begun"] and mentions(lines["changed"], "LoRA")
    assert mentions(run("rename", "done", "better")[1], "done", "better")
    assert resolve_adapter("better").is_dir() and not (adapters_home() / "done").exists()
    for name in ("better", "begun"):
        assert run("remove", "--yes", name)[0] == 0
    assert mentions(run("remove")[2], "remove", "1", "0")
    assert mentions(run("rename", "done")[2], "rename", "2", "1")
    assert [one.name for one in adapters_home().iterdir()] == ["changed"]
    for argv, named in (
        (("remove", "better-1"), ("better-1",)),
        (("rename", "changed", "a/b"), ("NEW a/b",)),
        (("rename", "changed", ""), ("NEW",)),
        (("rename", "changed", "none"), ("NEW none",)),
        (("rename", "changed", "changed"), ()),
    ):
        code, out, err = run(*argv)
        assert (code, out) == (2, "") and mentions(one_line(err, adapters.PROG), *named)
    with locked_folder(adapters_home() / "changed"):
        code, _, err = run("remove", "changed", "--yes")
        assert code == 2 and str(adapters_home() / "changed") in err
    assert (adapters_home() / "changed" / "plan.json").exists()
    (adapters_home() / "changed" / "plan.json").write_text("{")  # what is broken goes, too
    assert run("remove", "changed", "--yes")[0] == 0 and not any(adapters_home().iterdir())


def test_adapters_of_others_are_listed_in_lines_of_their_own(base, capsys):
    name = "x\x1b]0;mine\x07\nok\u202e"
    run = make_run(base, name).parent
    plan = json.loads((run / "plan.json").read_text())
    plan["base"]["model"] = "\x1b[2J\rmodel\nin /: 9 adapters"
    (run / "plan.json").write_text(json.dumps(plan))
    assert exit_code(adapters.main) == 0
    out = capsys.readouterr().out
    assert len(out.splitlines()) == 2 and all(line.isprintable() for line in out.splitlines())
    assert exit_code(adapters.main, "rename", name, "mine") == 0
    assert capsys.readouterr().out.count("\n") == 1


NO_NAMES = (
    "", ".", "..", "/", "./mine", "mine/", "mine/adapter", "../adapters/mine", "a\0b", "mine\n",
    "\u2215", "\u2024\u2024", "*", "~", "{home}", "{home}/mine", "link/../mine",
)  # fmt: skip


@pytest.mark.parametrize("name", NO_NAMES)
def test_only_the_name_of_an_adapter_is_removed_or_renamed(name, base, tmp_path, capsys):
    """An empty one, of a shell variable that is not set, would lead to all of them."""
    make_run(base, "mine")
    before = snapshot(tmp_path)
    name = name.format(home=adapters_home())
    for argv in (("remove", name, "--yes"), ("rename", name, "zz")):
        exits(capsys, adapters.main, *argv)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("new", ["", ".", "..", "none", "auto", "shipped", "a/b", "/tmp/x", "a\nb"])
def test_a_new_name_is_one_that_an_adapter_may_have(new, base, tmp_path, capsys):
    make_run(base, "mine")
    write_tiny_adapter(tmp_path / "shelf" / "shipped", base)
    before = snapshot(tmp_path)
    assert mentions(exits(capsys, adapters.main, "rename", "mine", new), "NEW")
    assert snapshot(tmp_path) == before


def test_an_empty_name_is_none_for_a_new_adapter(base, capsys):
    assert mentions(exits(capsys, adapt.main, "--model", base, "--name", ""), "--name")
    assert not adapters_home().exists()


def test_of_a_link_the_link_alone_is_removed(base, tmp_path, capsys):
    elsewhere = make_run(base, "mine").parent.rename(tmp_path / "elsewhere")
    (adapters_home() / "mine").symlink_to(elsewhere)
    before = snapshot(elsewhere)
    assert exit_code(adapters.main, "remove", "mine", "--yes") == 0
    assert snapshot(elsewhere) == before and not any(adapters_home().iterdir())


def test_removing_asks_on_a_terminal_and_needs_yes_elsewhere(base, capsys):
    folder = make_run(base, "mine").parent
    remove = ("ssmlx.adapters", "remove", "mine")
    code, shown = on_a_terminal(*remove, typed=b"\n", prompt=b"[y/N]")
    assert code == 1 and str(folder) in shown and folder.is_dir()
    assert mentions(exits(capsys, adapters.main, "remove", "mine"), "--yes")
    assert folder.is_dir()
    assert on_a_terminal(*remove, typed=b"y\n", prompt=b"[y/N]")[0] == 0
    assert not folder.exists()


# --- what is told ---


def test_a_full_disk_is_named_by_the_file(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_bytes", full)
    with pytest.raises(OSError) as caught:
        write_whole(tmp_path / "a.json", b"{}")
    assert caught.value.filename == str(tmp_path / "a.json")
    with pytest.raises(OSError) as caught, naming_file("b"):
        raise OSError(errno.ENOENT, "No such file", "c")
    assert caught.value.filename == "c"


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_bar_is_drawn_before_anything_is_counted(monkeypatch):
    enable_progress_bars()  # which converting a model has switched off
    monkeypatch.setattr(bars, "PATIENCE_SECONDS", 0.05)
    monkeypatch.setattr(bars, "_TICK_SECONDS", 0.02)
    for shown in (True, False):
        screen = Terminal()
        monkeypatch.setattr(sys, "stderr", screen)
        token = bars.shown.set(shown)
        try:
            with bars.busy("loading"):
                wait_until_drawn(screen, "loading: ", shown)
            found = list(bars.bar(items_once_drawn(screen, shown), "answers", total=2))
        finally:
            bars.shown.reset(token)
        assert found == [0, 1]
        drawn = screen.getvalue()
        assert ("loading: " in drawn, "answers:   0%" in drawn) == (shown, shown)


def items_once_drawn(screen, shown):
    wait_until_drawn(screen, "answers:   0%", shown)
    yield from range(2)


def wait_until_drawn(screen, text, shown):
    """Wait for a text on the screen; where none is to come, four times as long as a bar waits."""
    end = time.monotonic() + (60 if shown else 0.2)
    while text not in screen.getvalue() and time.monotonic() < end:
        time.sleep(0.01)
