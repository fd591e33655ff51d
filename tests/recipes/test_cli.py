"""The command: what each subcommand prints, refuses and exits with; what is shown is a recipe again."""

import errno
import os
import shlex
import shutil
import sys

import pytest
import yaml
from command_line import prints
from draftsmith.core import ranks
from draftsmith.core.errors import CRASH, MISTAKE, OK, STOPPED
from draftsmith.core.results import BEGUN, DONE, Mark, write_mark
from draftsmith.recipes.commands import cli, stages
from draftsmith.recipes.commands.cli import COMMANDS, main
from draftsmith.recipes.commands.command import NAME
from draftsmith.recipes.commands.recipes import shown
from draftsmith.recipes.config.files import recipe_names
from draftsmith.recipes.config.load import load
from draftsmith.trainers.run.launcher import num_ranks
from draftsmith.trainers.run.matching import FINGERPRINTS
from fails import raising


def test_a_restart_with_wrong_data_moves_nothing(tmp_path, monkeypatch, capsys):
    output = tmp_path / "run"
    for stage in ("world", "seeing", "target", "language", "pretrain"):
        (output / stage).mkdir(parents=True)
        (output / stage / "done.json").write_text('{"fingerprint": "f", "version": 2}')
    monkeypatch.setattr("draftsmith.trainers.run.run.run_stages", lambda *a, **k: pytest.fail("it began to run"))
    data = f"stages.pretrain.data={{path: {tmp_path / 'absent.json'}, from: null}}"
    words = ["recipe=demo/lvlm-from-nothing", f"output={output}", data, "stages=[pretrain]", "restart=pretrain"]
    assert "error: not on disk" in prints(capsys, words, MISTAKE)
    left = sorted(path.name for path in output.iterdir() if path.name != ".locks")
    assert left == ["language", "pretrain", "seeing", "target", "world"]


def test_a_run_whose_later_stage_has_no_data_does_not_begin(tmp_path, monkeypatch, capsys):
    """It ran every stage before that one first, for hours."""
    monkeypatch.setattr("draftsmith.trainers.run.run.run_stages", lambda *a, **k: pytest.fail("it began to run"))
    words = ["recipe=demo/lvlm-from-nothing", f"output={tmp_path / 'run'}"]
    data = f"stages.finetune.data={{path: {tmp_path / 'absent.json'}, from: null}}"
    said = prints(capsys, [*words, data], MISTAKE)
    assert "not on disk" in said and "stages.finetune.data" in said and "stages=[...]" in said
    begun = []
    monkeypatch.setattr("draftsmith.trainers.run.run.run_stages", lambda *a, **k: begun.append(a))
    other = f"output={tmp_path / 'other'}"  # a run's lock is its process's
    assert main(["recipe=demo/lvlm-from-nothing", other, data, "stages=[world,seeing]"]) == OK and len(begun) == 1


@pytest.mark.parametrize("name", ["recipe.yaml", "run.yaml"])
def test_a_file_that_no_run_wrote_is_not_written_over(name, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("draftsmith.trainers.run.run.run_stages", lambda *a, **k: None)
    mine = tmp_path / name
    mine.write_text("# my own\nextends: demo/lvlm\n")
    recipe = f"recipe={mine}" if name == "recipe.yaml" else "recipe=demo/lvlm"
    assert main([recipe, f"output={tmp_path}", "stages=[world]"]) == MISTAKE
    assert f"where: {mine}" in capsys.readouterr().err and mine.read_text().startswith("# my own")


def test_a_runs_own_files_are_written_again(tmp_path, monkeypatch):
    monkeypatch.setattr("draftsmith.trainers.run.run.run_stages", lambda *a, **k: None)
    run, again, killed = (tmp_path / name for name in ("run", "again", "killed"))  # a run's lock is its process's
    assert main(["recipe=demo/lvlm", f"output={run}", "stages=[world]"]) == OK
    for other in (again, killed):
        other.mkdir()
        shutil.copy2(run / "run.yaml", other)
    shutil.copy2(run / "recipe.yaml", again)
    assert main([f"recipe={again / 'recipe.yaml'}", f"output={again}", "stages=[world]"]) == OK
    assert main(["recipe=demo/lvlm", f"output={killed}", "stages=[world]"]) == OK, "killed between the two"
    assert (killed / "recipe.yaml").is_file()


def test_a_second_recipe_in_a_folder_keeps_the_finished_stages_of_the_first(tmp_path, monkeypatch, capsys):
    """It wrote `recipe.yaml` over: a publication knew nothing of what ran before."""

    def run_stages(plan, *_, output, **__):
        for stage in plan:
            (output / stage.name).mkdir(exist_ok=True)
            mark = Mark(stage.fingerprint, FINGERPRINTS, settings=stage.settings)
            write_mark(output / stage.name / (BEGUN if stage.name == "evaluate" else DONE), mark)

    def second(code, *words, **changed):
        (tmp_path / "second.yaml").write_text(yaml.safe_dump(tree | changed, sort_keys=False))
        copy = tmp_path / f"run-{len([*tmp_path.iterdir()])}"  # a run's lock is its process's
        shutil.copytree(tmp_path / "run", copy, ignore=shutil.ignore_patterns(".*"))
        said = prints(capsys, [f"recipe={tmp_path / 'second.yaml'}", f"output={copy}", *words], code)
        return said, [*yaml.safe_load((copy / "recipe.yaml").read_text())["stages"]]

    monkeypatch.setattr("draftsmith.trainers.run.run.run_stages", run_stages)
    tree = load(["recipe=demo/lvlm"]).tree
    world, evaluate, finetune = (tree["stages"][name] for name in ("world", "evaluate", "finetune"))
    (tmp_path / "run").mkdir()
    names = second(OK, stages={"elsewhere": world} | tree["stages"] | {"probe": evaluate})[1]
    (tmp_path / "run").rmdir()
    (tmp_path / "run-2").rename(tmp_path / "run")
    fewer = names[1:-2]
    shared = {name: tree["stages"][name] for name in fewer}
    assert second(OK, stages=shared)[1] == ["elsewhere", *fewer, "probe"]
    assert second(OK, "restart=world", stages=shared)[1] == ["elsewhere", *fewer], "what is built on it alone goes"
    more = second(OK, stages=shared | {"later": finetune, "evaluate": evaluate})[1]
    assert more == ["elsewhere", *fewer, "probe", "later", "evaluate"], "in the recipe's order"
    for restart in ((), ("restart=there",)):
        said, there = second(MISTAKE, *restart, stages={"there": world}, seed=9)
        assert f"of another recipe: elsewhere, {', '.join(fewer)}, probe" in said and there == names
        assert "choose another output" in said and "its own `drafter`" in said
    shutil.rmtree(tmp_path / "run" / ".locks")
    (tmp_path / "run" / "recipe.yaml").write_text("- ")
    assert "delete it" in prints(capsys, ["recipe=demo/lvlm", f"output={tmp_path / 'run'}"], MISTAKE)


@pytest.mark.parametrize("words", ["recipe=demo/lvlm seed=3", "train demo/lvlm seed=3", "evaluate demo/lvlm seed=3"])
def test_each_way_to_run_passes_on_what_was_typed(monkeypatch, words):
    """A subcommand runs other words than those that were typed; secrets are hidden."""
    commands = []
    for module in (cli, stages):
        monkeypatch.setattr(module, "run_recipe", lambda arguments, command: commands.append(command) or MISTAKE)
    secret = "output=hf_" + "a1B2" * 9
    assert main([*words.split(), secret]) == MISTAKE and commands == [f"draftsmith {words} 'output=<hidden>'"]


# One for each track here, drafters in a stage and a method's name that ends in tokens; all others in the slow tier, for
# reading YAML takes its time.
SOME = {"demo/lvlm", "llava15-160m", "eagle-llamagen-c2i-l", "sparrow-qwen2.5-vl-7b"}
SOME |= {"demo/compare", "demo/visual-ar-blocks", "dflash-llava15-7b"}


@pytest.mark.parametrize(
    "name", [n if n in SOME else pytest.param(n, marks=pytest.mark.slow) for n in sorted(recipe_names())]
)
def test_what_is_shown_is_a_recipe_that_resolves_to_the_same(name, tmp_path):
    loaded = load([f"recipe={name}", "seed=5"])
    for number, defaults in enumerate((True, False)):
        text = shown(loaded, defaults=defaults)
        path = tmp_path / f"{number}.yaml"
        path.write_text(text)
        again = load([f"recipe={path}"]).recipe
        assert again.model_dump(mode="json", by_alias=True) == loaded.recipe.model_dump(mode="json", by_alias=True)
        assert len(text) > 100


def test_a_runs_folder_stands_for_its_recipe(tmp_path, capsys):
    run = tmp_path / "run"
    run.mkdir()
    tree = load(["recipe=demo/lvlm", "output=elsewhere", "seed=9"]).tree
    (run / "recipe.yaml").write_text(yaml.safe_dump(tree))
    result = yaml.safe_load(prints(capsys, ["show", str(run), "--no-defaults"], OK))
    assert result["seed"] == 9 and result["output"] == str(run)
    (tmp_path / "other").mkdir()
    assert "is a folder, and no recipe" in prints(capsys, ["show", str(tmp_path / "other")], MISTAKE)


def test_a_command_runs_the_stages_of_its_kind():
    recipe = "recipe=demo/lvlm"
    assert stages.chosen([recipe], "train") == [recipe, "stages=[world,language,pretrain,finetune]"]
    assert stages.chosen([recipe, "--stages=evaluate"], "evaluate") == [recipe, "stages=[evaluate]"]


def test_commands_hand_on_to_one_runner(monkeypatch, capsys):
    given = []
    monkeypatch.setattr(stages, "run_recipe", lambda arguments, command: given.append(arguments) or STOPPED)
    monkeypatch.setattr(cli, "run_recipe", lambda arguments, command: given.append(arguments) or OK)
    assert main(["evaluate", "demo/lvlm", "seed=3"]) == STOPPED, "the run's exit code is the command's"
    assert main(["--local_rank=1", "train", "recipe=demo/lvlm", "stages=[world]"]) == STOPPED, "as a launcher starts it"
    assert main(["--local_rank=0", "recipe=demo/lvlm", "seed=3"]) == OK, "the present way"
    assert given == [["recipe=demo/lvlm", "seed=3", "stages=[evaluate]"], ["recipe=demo/lvlm", "stages=[world]"],
                     ["recipe=demo/lvlm", "seed=3"]]  # fmt: skip
    assert "measure it" not in capsys.readouterr().out, "it has not finished"


@pytest.mark.parametrize(("error", "code", "told", "hidden"), [
    (RuntimeError("no route to https://me:hunter2@host"), CRASH, "Traceback", "hunter2"),
    (KeyboardInterrupt, STOPPED, "the same command continues", "Traceback"),
])  # fmt: skip
def test_a_crash_hides_keys_and_an_interrupt_outside_of_training_has_no_traceback(
    error, code, told, hidden, monkeypatch, capsys
):
    monkeypatch.setattr(cli, "run_recipe", raising(error))
    said = prints(capsys, ["recipe=demo/lvlm"], code)
    assert told in said and hidden not in said


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_help_has_examples_that_parse(name, capsys):
    printed = prints(capsys, [name, "--help"], OK)
    command = COMMANDS[name]
    if name in ("demo", "train", "evaluate", "publish"):
        assert "dry_run=true" in printed, "what runs a recipe can say what it would do"
    assert len(command.examples) >= 1 and all(example in printed for example, _ in command.examples)
    for example, _ in command.examples:
        words = shlex.split(example.split(" > ")[0])
        own = words[words.index("draftsmith") :]
        assert own[1] == name
        given = command.parse(own[2:])
        if NAME in command.arguments and not given.name.startswith(("runs/", "mine")):
            load([f"recipe={given.name}", *given.settings])


@pytest.mark.parametrize(("words", "recipe", "settings"), [
    ([], "recipe=demo/lvlm", []),
    (["compare", "seed=1"], "recipe=demo/compare", ["seed=1"]),
    (["demo/video"], "recipe=demo/video", []),
    (["output=there", "dry_run=false"], "recipe=demo/lvlm", ["output=there", "dry_run=false"]),
])  # fmt: skip
def test_a_demo_is_started_by_the_launcher_without_a_checkout(words, recipe, settings, monkeypatch):
    started = []
    monkeypatch.setattr("os.execve", lambda *given: started.append(given))
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    main(["demo", *words])
    ((program, command, environment),) = started
    assert program == sys.executable == command[0]
    assert command[1:] == ["-m", "draftsmith.trainers.run.launcher", "draftsmith", recipe, *settings]
    load(command[4:])
    # The same numbers on every machine, and no network.
    assert environment["OMP_NUM_THREADS"] == "1" and environment["HF_HUB_OFFLINE"] == "1"
    assert environment["WANDB_MODE"] == "offline" and environment["PATH"]


def test_a_dry_run_of_a_demo_is_this_process_alone_and_of_as_many_ranks_as_would_start(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("os.execve", raising(AssertionError("a process was started")))
    monkeypatch.setattr(ranks, "has_group", lambda: False)  # earlier tests of this process may have made a group
    output, before = tmp_path / "run", dict(os.environ)
    said = prints(capsys, ["demo", "lvlm-from-nothing", f"output={output}", "dry_run=true"], OK)
    assert said.startswith(f"dry run: nothing is written, no network is used ({num_ranks()} rank(s))\n")
    assert "stage finetune (train)" in said and not output.exists() and dict(os.environ) == before


@pytest.mark.parametrize(("error", "told"), [
    (MemoryError(), "a limit of this machine: no memory is left"),
    (OSError(errno.EMFILE, os.strerror(errno.EMFILE), "/x/a"), "Too many open files"),
    (RuntimeError("[gloo/socket.cc:24] rv != -1. socket: Too many open files"), "a limit of this machine"),
    (RuntimeError("can't start new thread"), "can't start new thread"),
    (OSError(errno.EINVAL, "Invalid argument", "/proc/1/task/1/net"), "where: /proc/1/task/1/net"),  # data.path=/
    (OSError(errno.ELOOP, "Too many levels of symbolic links", "a"), "too many levels"),
])  # fmt: skip
def test_a_limit_of_the_machine_is_one_sentence(error, told, monkeypatch, capfd):
    monkeypatch.setattr(cli, "_dispatch", raising(error))
    said = prints(capfd, ["recipes"], MISTAKE)
    assert told in said and "hint:" in said and "Traceback" not in said
