"""Results are compared with what their stage wrote before another reads them, and damaged marks are named."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from draftsmith.core.results import read_mark, write_mark
from draftsmith.trainers.publish.decoding import measured_dtype
from draftsmith.trainers.run.matching import stage_state
from draftsmith.trainers.run.run import check_stages
from draftsmith.trainers.run.stage import Planned
from fails import fails_with
from ranks_run import run_ranks
from test_run import Note, planned, run, two_stages


class Read(Note):
    """A stage that writes what it reads of stage first."""

    def run(self, context) -> None:
        context.folder.joinpath("seen.txt").write_text((context.inputs["data"] / "note.txt").read_text())


class Typed(Note):
    """A stage whose `auto` became bfloat16, as a context of a GPU records it."""

    def run(self, context) -> None:
        path = context.folder / "fingerprint.json"
        write_mark(path, replace(read_mark(path), resolved={"target.dtype": "bfloat16"}))
        super().run(context)


def reading(tmp_path, **changes) -> list[Planned]:
    """A stage, which has run, and one that reads it."""
    first, second = two_stages()
    run(tmp_path, first)
    return [first, replace(second, stage=Read(), **changes)]


def damages() -> dict[str, Callable[[Path], object]]:
    """What happens to the folder of a finished stage."""
    return {
        "note.txt was changed after it was written": lambda folder: (folder / "note.txt").write_text("dome"),
        "note.txt has 5 bytes and was written with 4": lambda folder: (folder / "note.txt").write_text("done!"),
        "note.txt is missing": lambda folder: (folder / "note.txt").unlink(),
        "config.json is not one of its files": lambda folder: (folder / "config.json").write_text("{}"),
    }


@pytest.mark.parametrize("problem", damages())
def test_an_input_that_is_not_as_it_was_written_is_refused_by_name(problem, tmp_path):
    plan = reading(tmp_path)
    damages()[problem](tmp_path / "first")
    caught = fails_with("", run, tmp_path, *plan)
    assert caught.problem.startswith(f"stage second takes the data of stage first, and {problem}")
    assert caught.where == str(tmp_path / "first" / problem.split()[0])
    assert "put the file back as it was, or restart=first" in caught.hint
    assert not (tmp_path / "second").exists()
    run(tmp_path, *plan, restart="first")  # the cure that it names
    assert (tmp_path / "second" / "seen.txt").read_text() == "done"


def test_a_list_that_names_another_file_is_named_itself(tmp_path):
    """A bit of done.json was flipped: the file that it lists is missing, and the one that is there is not listed."""
    plan = reading(tmp_path)
    (tmp_path / "first" / "note.txt").rename(tmp_path / "first" / "model.safetensors")
    caught = fails_with("", run, tmp_path, *plan)
    assert caught.problem.endswith(
        "note.txt is missing (and 1 more); the folder's files are not those that done.json lists"
    )


def test_a_restart_of_a_reader_finds_the_damage_before_anything_moves(tmp_path):
    plan = reading(tmp_path)
    run(tmp_path, *plan)
    (tmp_path / "first" / "note.txt").write_text("dome")
    assert run(tmp_path, *plan)[-1] == "stage second: finished before, same inputs", "nothing reads it"
    fails_with(r"note\.txt was changed after it was written", run, tmp_path, *plan, restart="second")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "second"]


def test_a_copied_run_is_read_again_and_passes(tmp_path):
    """Other times and inodes, the same bytes; checkpoints, indices and logs are nobody's input."""
    plan = reading(tmp_path / "here")
    for name in ("checkpoints/step-1/a.pt", "cache/a.npz", "wandb-id"):
        path = tmp_path / "here" / "first" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("of this machine")
    shutil.copytree(tmp_path / "here", tmp_path / "there", copy_function=shutil.copyfile)
    os.utime(tmp_path / "there" / "first" / "note.txt", (1, 1))
    run(tmp_path / "there", *plan)
    assert (tmp_path / "there" / "second" / "seen.txt").read_text() == "done"


FOR_PEOPLE = ("metrics.jsonl", "skipped.jsonl", "sample.txt", "samples/1.png", "best-tau/config.json")


WORKING = ("checkpoints/step-1/engine/a.pt", "cache/a.npz", "wandb-id", ".hidden/a.json", "a.lock")


class Talks(Note):
    """A stage that leaves files for people and for itself as well."""

    def run(self, context) -> None:
        super().run(context)
        for name in (*FOR_PEOPLE, *WORKING):
            (context.folder / name).parent.mkdir(parents=True, exist_ok=True)
            (context.folder / name).write_text("for people")


def test_what_is_written_for_people_may_change_or_go(tmp_path):
    """It is listed, and no stage reads it. What a stage keeps for itself is not even listed."""
    plan = reading(tmp_path)
    shutil.rmtree(tmp_path / "first")
    first = replace(plan[0], stage=Talks())
    plan = [first, replace(plan[1], earlier={"first": first})]
    run(tmp_path, first)
    listed = json.loads((tmp_path / "first" / "done.json").read_text())["files"]
    assert sorted(listed) == sorted(["note.txt", *FOR_PEOPLE])
    for name in FOR_PEOPLE:
        (tmp_path / "first" / name).write_text("edited")
    (tmp_path / "first" / "metrics.jsonl").unlink()
    run(tmp_path, *plan)
    assert (tmp_path / "second" / "seen.txt").read_text() == "done"


def test_a_file_is_read_once_by_a_run_unless_it_changes(tmp_path, monkeypatch):
    plan = reading(tmp_path)
    read = []
    digest = hashlib.file_digest

    def noted(file, how):
        read.append(Path(file.name).name)
        return digest(file, how)

    monkeypatch.setattr(hashlib, "file_digest", noted)
    run(tmp_path, *plan, replace(plan[1], name="third"))
    assert read == ["seen.txt"] * 2, "a stage's own files are known since it listed them"
    os.utime(tmp_path / "first" / "note.txt")
    run(tmp_path, *plan, *(replace(plan[1], name=name) for name in ("fourth", "fifth")))
    assert sorted(read) == ["note.txt", *["seen.txt"] * 4]


RANK = """
import sys
sys.path.insert(0, {folder!r})
from dataclasses import replace
from pathlib import Path
import torch.distributed as dist
from draftsmith.core import results
from draftsmith.core.errors import UserError
from test_results import Read
from test_run import run, two_stages

first, second = two_stages()
dist.init_process_group("gloo")
try:
    run(Path(sys.argv[1]), first, replace(second, stage=Read()))
except UserError as error:
    print(results._xxh3.cache_info().misses, error.problem.splitlines()[0])
dist.destroy_process_group()
"""


def test_rank_0_reads_and_both_ranks_refuse(tmp_path):
    reading(tmp_path)
    (tmp_path / "first" / "note.txt").write_text("dome")
    script = RANK.format(folder=str(Path(__file__).parent))
    said = [text.splitlines()[-1] for _, text in run_ranks(2, script, str(tmp_path), cwd=tmp_path)]
    problem = "stage second takes the data of stage first, and note.txt was changed after it was written"
    assert [line.partition(": ")[0] for line in said] == [f"1 {problem}", f"0 {problem}"], said


def test_a_stage_of_another_run_is_checked_where_a_path_names_it(tmp_path):
    reading(tmp_path / "other")
    settings = {"drafter": {"kind": "eagle", "path": str(tmp_path / "other" / "first")}, "stages": {"note": {}}}
    mine = planned(settings=settings)
    (tmp_path / "other" / "first" / "note.txt").write_text("dome")
    fails_with(r"takes what another run left in .*first, and note\.txt was changed", run, tmp_path / "mine", mine)


# ---- marks that are damaged, or missing


@pytest.mark.parametrize("name", ["done.json", "fingerprint.json"])
@pytest.mark.parametrize("cut", [b"", b'{"fingerprint": "f", "ver', b"[1]", bytes(64), b'{"fingerprint": "\xff"}'])
def test_a_damaged_mark_is_named_and_may_be_deleted(cut, name, tmp_path):
    run(tmp_path, planned())
    path = tmp_path / "note" / name
    whole = path.read_bytes()
    path.write_bytes(cut)
    error = fails_with("", run, tmp_path, planned())
    assert error.where.startswith(str(path)) and "delete it" in error.hint
    assert "delete it" in stage_state(planned(), tmp_path).hint, "which `draftsmith check` says"
    path.unlink()
    finished = "stage note: finished before, same inputs"
    if name == "fingerprint.json":
        fails_with(
            "with other settings, .*: its settings, which are not known", run, tmp_path, planned(fingerprint="g")
        )
        assert run(tmp_path, planned()) == [finished] and path.read_bytes() == whole
    else:
        waits = planned(name="second", inputs={"data": "note"}, earlier={"note": planned()})
        fails_with("which has not finished", check_stages, [planned(), waits], tmp_path, ["second"], None)
        assert run(tmp_path, planned())[0] == "stage note"
    assert run(tmp_path, planned()) == [finished]


def test_what_auto_became_in_a_finished_stage_outlives_its_fingerprint_file(tmp_path):
    """Its report is of that type, which another machine would not find again."""
    run(tmp_path, planned(stage=Typed()))
    path = tmp_path / "note" / "fingerprint.json"
    whole = path.read_bytes()
    path.unlink()
    run(tmp_path, planned(stage=Typed()))
    assert path.read_bytes() == whole and measured_dtype(tmp_path / "note") == "bfloat16"


def test_what_nobody_knows_the_settings_of_is_kept_aside(tmp_path):
    """Rows of other settings may lie there, and a run would go on after them."""
    folder = tmp_path / "note"
    folder.mkdir()
    (folder / "rows.jsonl").write_text("of other settings")
    said = run(tmp_path, planned())
    assert "so the settings of what is there are not known: it is kept in" in said[1]
    assert sorted(path.name for path in folder.iterdir()) == ["done.json", "fingerprint.json", "note.txt"]
    assert (tmp_path / "note.before-1" / "rows.jsonl").read_text() == "of other settings"
