"""The list of checksums: what is missing, changed or added is named; what was never listed is taken as it is."""

import hashlib

import pytest
from draftsmith.core.results import SUMS, check_sums, read_sums, write_sums
from fails import fails_with


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "report").mkdir()
    for name in ("config.json", "model.safetensors", "report/report.md", "README.md", ".gitattributes"):
        (tmp_path / name).write_bytes(name.encode() * 3)
    write_sums(tmp_path)
    return tmp_path


def test_a_whole_folder_passes_whatever_its_card_says(folder):
    (folder / "README.md").write_text("edited where it is read")
    (folder / ".gitattributes").unlink()
    check_sums(folder)
    assert sorted(read_sums(folder)) == ["config.json", "model.safetensors", "report/report.md"]


def test_the_list_is_the_usual_tools(folder):
    """`sha256sum --check` reads lines of a lower-case digest, two blanks and a name."""
    names = ("config.json", "model.safetensors", "report/report.md")
    lines = [f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()}  {name}" for name in names]
    assert (folder / SUMS).read_text() == "".join(f"{line}\n" for line in lines)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "report/report.md"])
def test_missing_and_edited_files_are_named(name, folder):
    (folder / name).write_bytes((folder / name).read_bytes()[:-1] + b"x")
    fails_with(f"{name} is not as it was published", check_sums, folder)
    (folder / name).unlink()
    assert fails_with(f"{name} is missing", check_sums, folder).where == str(folder / name)


@pytest.mark.parametrize("name", ["adapter_config.json", "pytorch_model.bin", "modeling.py"])
def test_a_file_that_a_loader_would_pick_up_is_refused(name, folder):
    (folder / name).write_text("{}")
    fails_with(name, check_sums, folder)


def test_what_no_loader_reads_may_be_added_and_without_a_list_all_is_taken(folder):
    (folder / "vllm").mkdir()
    for name in ("notes.txt", "vllm/config.json"):
        (folder / name).write_text("{}")
    check_sums(folder)
    (folder / SUMS).unlink()
    check_sums(folder)


def test_only_what_is_read_is_asked_for(folder):
    (folder / "report/report.md").unlink()
    check_sums(folder, only=("config.json", "*.safetensors"))
    (folder / "model.safetensors").unlink()
    fails_with(r"model\.safetensors is missing", check_sums, folder, only=("config.json", "*.safetensors"))


@pytest.mark.parametrize("line", ["no checksum", "0" * 64 + "  ../../outside", "0" * 64 + "  /etc/passwd"])
def test_a_list_that_is_none_or_leads_outside(line, folder):
    (folder / SUMS).write_text(line + "\n")
    fails_with("no line of checksums", check_sums, folder)


def test_heads_are_held_against_the_list_of_their_folder(folder):
    """Of a folder that was fetched for its weights alone; its report may be missing."""
    from draftsmith.models.folders import find_folder

    (folder / "report/report.md").unlink()
    assert find_folder(folder, None) == folder
    (folder / "model.safetensors").write_bytes(b"other weights")
    fails_with(r"model\.safetensors is not as it was published", find_folder, folder, None)
