"""Nothing is published that holds a secret, wherever in a file it stands; the message names file and rule."""

import json
import zlib

import pytest
import torch
from draftsmith.eval.html_page import html_page
from draftsmith.eval.tables import Figure
from draftsmith.trainers.publish.no_secrets import refuse_secrets
from fails import fails_with
from PIL import Image, PngImagePlugin
from safetensors.torch import save_file

# Made up, and put together here, so that scanners of repositories pass over this file.
KEY = "gl" + "pat-" + "AbCd_EfGh-IjKl012345"
COMMIT = "76543210fedcba9876543210fedcba9876543210"


def picture(path, secret, **options):
    notes = PngImagePlugin.PngInfo()
    notes.add_text("Comment", f"made with {secret}", **options)
    Image.new("RGB", (8, 8)).save(path, pnginfo=notes)


def page_with_a_picture(path, secret):
    picture(path.with_suffix(".png"), secret, zip=True)
    path.write_text(html_page("a", [Figure("plot.png", "b")], path.parent))
    path.with_suffix(".png").unlink()


def exif(path, secret):
    notes = Image.Exif()
    notes[0x010E] = f"made with {secret}"
    Image.new("RGB", (8, 8)).save(path, exif=notes)


def pdf(path, secret):
    stream = zlib.compress(f"({secret}) Tj".encode())
    path.write_bytes(b"%PDF-1.4\n1 0 obj\n<</Filter/FlateDecode>>\nstream\n" + stream + b"\nendstream\nendobj\n%%EOF")


FILES = {
    "config.json": lambda path, secret: path.write_text(json.dumps({"nested": [{"note": f"x {secret}"}]})),
    "recipe.yaml": lambda path, secret: path.write_text(f"stages:\n  a: {{note: {secret}}}\n"),
    "README.md": lambda path, secret: path.write_text(f"run with `{secret}`\n"),
    "page.html": lambda path, secret: path.write_text(f"<td>{secret}</td>"),
    "plot.html": page_with_a_picture,
    "rows.csv": lambda path, secret: path.write_text(f"a,{secret},b\n"),
    "run.sh": lambda path, secret: path.write_text(f"export X={secret}\n"),
    "plot.svg": lambda path, secret: path.write_text(f"<svg><text>{secret}</text></svg>"),
    "plot.pdf": pdf,
    "plot.png": picture,
    "compressed.png": lambda path, secret: picture(path, secret, zip=True),
    "photo.jpg": exif,
    "model.safetensors": lambda path, secret: save_file({"a": torch.zeros(2)}, path, metadata={"note": secret}),
    "tokenizer.model": lambda path, secret: path.write_bytes(b"\x00\xff\x01" + secret.encode() + b"\x00"),
    "report/deep/report.json": lambda path, secret: path.write_text(json.dumps({secret: 1})),
    f"{KEY}.txt": lambda path, secret: path.write_text("the name says it"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_with_a_secret_is_refused_by_its_name(tmp_path, name):
    place = tmp_path / name
    place.parent.mkdir(parents=True, exist_ok=True)
    FILES[name](place, KEY)
    caught = fails_with(r"holds a secret in .* \(rule: .*gitlab", refuse_secrets, tmp_path, None)
    assert KEY not in str(caught) and "change the secret" in str(caught)
    if KEY not in name:
        assert name in caught.problem and str(caught.where) == str(place)
        FILES[name](place, "nothing")
        refuse_secrets(tmp_path, None)


@pytest.mark.parametrize("text", [
    "https://me:hunter2hunter2@host.org", "https://x.blob.core.windows.net/c?sv=1&sig=AbC%2Fd01234",
    "DefaultEndpointsProtocol=https;AccountKey=AbC/d01+234==;", '{"aws": {"secret_access_key": "hunter2"}}',
    "private_key: hunter2", "from-the-environment", "of-the-hub",
])  # fmt: skip
def test_other_secrets_are_refused(tmp_path, monkeypatch, text):
    monkeypatch.setenv("DATABASE_PASS", "from-the-environment")
    (tmp_path / "a.txt").write_text(f"x {text}\n")
    fails_with(r"a\.txt holds a secret in its text", refuse_secrets, tmp_path, "of-the-hub")


def test_hashes_commits_and_names_are_none(tmp_path):
    (tmp_path / "run.yaml").write_text(f"git: {{commit: {COMMIT}}}\nrevision: {COMMIT}\n")
    (tmp_path / "SHA256SUMS").write_text(f"{COMMIT}{COMMIT[:24]}  model.safetensors\n{COMMIT[:32]}  xxh3\n")
    (tmp_path / "README.md").write_text(f"https://huggingface.co/me/draft/commit/{COMMIT}, Qwen/Qwen2.5-VL-7B-Instruct")
    words = {"eos_token": "<|im_end|>", "image_token": "<image>", "vocab": {"password": 1, "secret": 2, "sk-": 3}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(words))
    refuse_secrets(tmp_path, None)
