"""Packages of three registries: hash first, members of the list alone; a client that is missing or fails."""

import hashlib
import io
import json
import shutil
import subprocess
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from draftsmith.core.files import FETCHED
from draftsmith.data.emoji import WORDING
from draftsmith.models.folders import FOLDER
from draftsmith.recipes.commands import fetch
from draftsmith.recipes.commands.cli import main
from draftsmith.recipes.commands.fetch import Package, cached, downloaded, files_at_hand, members
from fails import fails_with
from PIL import Image

NPM = Package("npm", "@some/one", "1.0.0", 1, "MIT", "0")
PYPI, DEBIAN = replace(NPM, registry="PyPI", name="one"), replace(NPM, registry="Debian", name="one")
A = "package/a/"
FILES = {f"{A}1.png": b"one", f"{A}2.png": b"two", "package/install.js": b"rm", "other/a/3.png": b"no"}


def tar(files, mode="w:gz"):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=mode) as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


def deb(data):
    parts = {"debian-binary": b"2.0\n", "control.tar.xz": b"odd", "data.tar.xz": data}
    heads = {name: f"{name:<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(part):<10}`\n" for name, part in parts.items()}
    return b"!<arch>\n" + b"".join(heads[n].encode() + part + b"\n" * (len(part) % 2) for n, part in parts.items())


def wheel(files):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return out.getvalue()


def known(package, data, folder):
    """The package with the hash of this file, and the file."""
    package = replace(package, sha256=hashlib.sha256(data).hexdigest())
    (folder / package.sha256).write_bytes(data)
    return package, folder / package.sha256


@pytest.mark.parametrize(
    "data", [tar(FILES), wheel(FILES), deb(tar({f"./{name}": data for name, data in FILES.items()}, "w:xz"))]
)
def test_members_are_those_of_the_list(tmp_path, data):
    (tmp_path / "file").write_bytes(data)
    assert dict(members(tmp_path / "file", f"{A}*.png")) == dict([*FILES.items()][:2])


def test_the_hash_is_compared_first(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    package, path = known(NPM, tar(FILES), tmp_path)
    other, of_other = known(DEBIAN, deb(b""), tmp_path)
    assert files_at_hand([of_other, path], [package, other]) == {package: path, other: of_other}, "in any order"
    good = path.read_bytes()
    path.write_bytes(good + b"x")
    said = fails_with("the file has the SHA-256", files_at_hand, [path, of_other], [package, other])
    assert said.where == str(path) and package.sha256 in str(said)
    runs = []

    def run(command, *, cwd, **_):
        runs.append(command)
        (cwd / "some-one-1.0.0.tgz").write_bytes(good if len(runs) > 1 else b"another file")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(fetch.subprocess, "run", run)
    fails_with("came with the SHA-256", cached, package)
    file = tmp_path / "cache/draftsmith/packages/some-one-1.0.0.tgz"
    assert not file.exists() and [cached(package) for _ in range(2)] == [file] * 2
    assert runs == [["npm", "pack", "--ignore-scripts", "@some/one@1.0.0"]] * 2, "what lies in the cache is taken"
    file.write_bytes(b"damaged")
    assert cached(package).read_bytes() == good and len(runs) == 3


@pytest.mark.parametrize(
    ("package", "stderr", "command"),
    [(NPM, "npm error code E404\nnpm error 404 Not", "npm pack --ignore-scripts @some/one@1.0.0"),
     (DEBIAN, "E: Version not found\nodd", "apt-get download one=1.0.0"),
     (PYPI, "ERROR: none", "pip download --no-deps --only-binary=:all: one==1.0.0")],
)  # fmt: skip
def test_a_failing_or_missing_client_is_named_with_its_command(tmp_path, monkeypatch, package, stderr, command):
    done = subprocess.CompletedProcess(command, 1, "", stderr)
    monkeypatch.setattr(fetch.subprocess, "run", lambda *_, **__: done)
    first = stderr.splitlines()[0]
    error = fails_with(f"could not download .*one 1.0.0: {first}", downloaded, package, tmp_path)
    assert f"{command}; then --file FILE" in error.hint
    monkeypatch.undo()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(fetch.sys, "executable", str(tmp_path / "none"))
    fails_with("cannot be run", downloaded, package, tmp_path)


def picture(kind):
    out = io.BytesIO()
    Image.new("RGBA", (8, 6), "red").save(out, kind)
    return out.getvalue()


def test_a_model_comes_with_its_pictures_and_what_is_there_stays(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    packages = [known(replace(NPM, name=name), name.encode(), tmp_path) for name in ("lm", "few", "more")]
    (lm, of_lm), (few, of_few), (more, of_more) = packages

    def model(folder, files):
        (folder / "read").write_bytes(files[lm].read_bytes())
        shutil.copy(FOLDER / "emoji-vlm" / "made.json", folder)

    write = {"emoji-vlm": model, "emoji": lambda folder, files: fetch._sign(folder, files, {"wording": WORDING})}
    for name, needed, others in ("emoji-vlm", (lm,), ()), ("emoji", (few,), (more,)):
        thing = replace(fetch.THINGS[name], packages=needed, more=others, write=write[name])
        monkeypatch.setitem(fetch.THINGS, name, thing)
    command = ["fetch", "emoji-vlm", "--wheel", str(of_lm), "--file", str(of_few)]
    assert main(command) == 0 and "target: {kind: llava, path: weights/emoji-vlm}" in capsys.readouterr().out
    assert (tmp_path / "weights/emoji-vlm/read").read_bytes() == b"lm"
    assert main(command) == 0
    assert {"here     weights/emoji-vlm, which is not fetched again", "here     data/emoji, which is not fetched again"
            } <= {*capsys.readouterr().out.splitlines()}  # fmt: skip
    assert main([*command, "--file", str(of_more), "--pictures", "all"]) == 2
    assert "it was made without more 1.0.0\n  where: data/emoji" in capsys.readouterr().err
    for made, of in ("data/emoji/manifest.json", WORDING), ("weights/emoji-vlm/made.json", '"seed": '):
        (tmp_path / made).write_text((tmp_path / made).read_text().replace(of, "1"))
        assert main(command) == 2
        assert f"another version of draftsmith made it\n  where: {Path(made).parent}" in capsys.readouterr().err
    assert main(["fetch", "emoji", "other", "--file", str(of_lm)]) == 2 and {*fetch.THINGS} == {*FETCHED}


def test_emoji_and_stamps_are_written_out_of_files_at_hand(tmp_path, monkeypatch, capsys):
    names = {"\U0001f415": ["dog", "animal", "pet"], "\U0001f34e": ["red_apple", "fruit"]}
    groups = [{"codes": f"{ord(char):X}", "char": char, "group": "Objects", "subgroup": "thing"} for char in names]
    birds = "./usr/share/tuxpaint/stamps/animals/birds/"
    stamps = {"owl.png": picture("PNG"), "owl.txt": b"An owl.\nde.utf8=Eule.", "owl_desc.ogg": b"sound",
              "jay.png": picture("PNG"), "jay.txt": b"A jay!", "odd.png": b"no text"}  # fmt: skip
    archives = {
        "_FLUENT": tar({f"package/assets/{code}.webp": picture("WEBP") for code in ("1f415", "1f34e")}),
        "_NAMES": tar({"package/dist/emoji-en-US.json": json.dumps(names).encode()}),
        "_GROUPS": tar({"package/emoji.json": json.dumps(groups).encode()}),
        "_STAMPS": deb(tar({f"{birds}{name}": data for name, data in stamps.items()}, "w:xz")),
    }
    pairs = {name: known(getattr(fetch, name), data, tmp_path) for name, data in archives.items()}
    for name, (package, _) in pairs.items():
        monkeypatch.setattr(fetch, name, package)
    *emoji, (stamp, of_stamp) = pairs.values()
    monkeypatch.setattr(fetch, "_PICTURES", {"fluent": (emoji[0][0], "package/assets/*.webp")})
    for thing, its in ("stamps", [(stamp, of_stamp)]), ("emoji", emoji):
        monkeypatch.setitem(fetch.THINGS, thing, replace(fetch.THINGS[thing], packages=tuple(p for p, _ in its)))
        files = [word for _, file in its for word in ("--file", str(file))]
        assert main(["fetch", thing, str(tmp_path / thing), *files]) == 0
        shown, notice = capsys.readouterr().out, (tmp_path / thing / "NOTICE").read_text()
        assert all(package.licence in shown and package.licence in notice for package, _ in its)
        (name, count), *_ = json.loads((tmp_path / thing / "manifest.json").read_text())["records"].items()
        rows = json.loads((tmp_path / thing / f"{name}.json").read_text())
        assert len(rows) == count == {"stamps": 2, "emoji": 6}[thing]
    named = json.loads((tmp_path / "stamps" / "names.json").read_text())
    assert [row["conversations"][-1]["value"] for row in named] == ["A jay.", "An owl."]
    assert main(["fetch", "stamps", str(tmp_path / "no"), "--pictures", "all"]) == 2
    assert "has no --pictures" in capsys.readouterr().err and not (tmp_path / "no").exists()
