"""A target of pretrained halves through its stages: captions, a teacher that reads text, and what its answers teach."""

import importlib
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from draftsmith.data.conversations import PromptFormat
from draftsmith.data.dataset import ConversationData, ConversationDataset
from draftsmith.data.families.processor import tile_pixels
from draftsmith.data.processor_files import load_processor
from draftsmith.data.shards.shards import ShardReader, claim, finish, write_shard
from draftsmith.data.sources import SHARDS, SKIPPED, Answers, AnswersConfig
from draftsmith.models.folders import ADAPTERS, joined_halves, with_adapters
from draftsmith.models.targets.base import Taps
from draftsmith.models.targets.llava.model import selected_features
from draftsmith.models.targets.llava.section import LlavaTarget
from draftsmith.recipes.config.dry_run import dry_run
from draftsmith.recipes.config.plan import plan
from draftsmith.trainers.train import on_records
from fails import fails_with
from halves_tiny import SIDE, language_model, tower
from PIL import Image
from safetensors.torch import load_file, save_file
from stages_run import list_anew, runner
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoProcessor, AutoTokenizer, LlavaForConditionalGeneration

NAMES = ["red apple", "green pear", "blue cup", "old tree", "round ball", "small cat"]
QUESTION = "What is this? Picture: "


def recipe(folder):
    data = {"path": str(folder / "data.json"), "aspect": "square", "max_length": 128, "on_error": "skip"}
    read = {"data": data, "format": {"template": "qwen", "system": "", "image_rule": "verbatim", "image_join": "hf"}}
    train = read | {
        "kind": "train", "model": "target", "steps": 2, "batch_size": 4, "micro_batch_size": 4, "log_every": 1,
        "optim": {"lr": 1e-2, "warmup_steps": 1, "clip_norm": 1.0}, "trainable": ["projector"],
    }  # fmt: skip
    learn = train | {"from": "caption", "answers": {"from": "answers"}}
    both = {"trainable": ["projector", "language_model"], "lora": {"rank": 2}}
    kept = {"objective": {"kind": "distill", "divergence": "kl", "probabilities": "kept"}}
    answers = {"kind": "regenerate", "pictures": "told", "keep_logprobs": 4, "max_new_tokens": 6}
    return {
        "target": {"kind": "llava", "language_model": str(folder / "lm"), "vision_tower": str(folder / "tower")},
        "stages": {
            "caption": train, "answers": read | answers, "finetune": learn | both, "distilled": learn | kept,
        },
    }  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The run, what was said, and what loads and runs its recipe."""
    folder = tmp_path_factory.mktemp("emoji")
    records = []
    for number, name in enumerate(NAMES):
        Image.new("RGB", (SIDE, SIDE), (40 * number, 255 - 40 * number, 90)).save(folder / f"{number}.png")
        turns = [{"from": "human", "value": f"{QUESTION}<image>"}, {"from": "gpt", "value": f"A {name}."}]
        record = {"id": name, "image": f"{number}.png", "conversations": turns, "told": [f"a {name} (thing: nice)"]}
        record |= {"name": name, "kind": "naming"}
        records.append(record)
    del records[-1]["told"]
    (folder / "data.json").write_text(json.dumps(records))
    language_model(folder / "lm")
    tower(folder / "tower")
    loaded, run = runner(lambda: recipe(folder), "recipe")
    return folder, run(folder / "run"), loaded, run


def weights(folder):
    return load_file(folder / "model.safetensors")


def test_a_dry_run_has_the_sizes_of_both_halves(made):
    folder, _, loaded, _ = made
    one = loaded(folder / "other")
    lines = dry_run(one.recipe, plan(one.recipe, one.path))
    text = sum(value.numel() for value in weights(folder / "lm").values())
    assert f"{text + 2 * 32:,}" in lines and "makes it of two halves" in lines, "two rows more"


def test_a_stage_writes_a_folder_that_later_ones_and_others_load(made):
    folder, _, _, _ = made
    first, last = (
        LlavaForConditionalGeneration.from_pretrained(folder / "run" / name).state_dict()
        for name in ("caption", "finetune")
    )
    lm, table = weights(folder / "lm"), first["model.language_model.embed_tokens.weight"]
    rows = len(lm["model.embed_tokens.weight"])
    assert torch.equal(table[:rows], lm["model.embed_tokens.weight"]) and len(table) == rows + 2, "<image> and <pad>"
    eyes = {f"model.vision_tower.{name}": value for name, value in weights(folder / "tower").items()}
    assert all(torch.equal(first[name], value) and torch.equal(last[name], value) for name, value in eyes.items())
    inside = {name: f"model.language_model.{name.removeprefix('model.')}" for name in lm if "embed" not in name}
    assert all(torch.equal(first[there], lm[name]) for name, there in inside.items()), "captions move the projector"
    moved = {name for name, there in inside.items() if not torch.equal(last[there], lm[name])}
    assert moved == {name for name in inside if "_proj" in name}, "adapters are merged"
    processor = load_processor(folder / "run" / "finetune")
    assert processor.selects == "full" and processor.num_image_tokens == 4
    parts = [{"type": "text", "text": QUESTION}, {"type": "image"}]
    shown = processor.tokenizer.apply_chat_template(
        [{"role": "user", "content": parts}], tokenize=False, add_generation_prompt=True
    )
    assert shown == f"<|im_start|>user\n{QUESTION}<image><|im_end|>\n<|im_start|>assistant\n"


@torch.inference_mode()
def test_what_was_trained_of_the_halves_can_be_put_on_them_again(made, tmp_path, monkeypatch):
    folder, stage = made[0], tmp_path / "run" / "finetune"
    monkeypatch.syspath_prepend(Path(__file__).resolve().parents[2] / "scripts")
    shipping = importlib.import_module("ship_target")
    monkeypatch.setattr(shipping, "PINNED", tmp_path)
    shutil.copytree(folder / "run" / "finetune", stage)
    halves = folder / "lm", folder / "tower"
    start = joined_halves(*halves)
    state = {n: t.to(start[n].dtype) if n in start else t.bfloat16() for n, t in weights(stage).items()}  # as of bf16
    save_file(state, stage / "model.safetensors")
    about = {"recipe": "target.yaml", "git": {"commit": "a" * 40, "changed_files": 0}}
    (stage.parent / "run.yaml").write_text(json.dumps(about))
    assert shipping.ship(stage, tmp_path / "few", halves)["recipe"] == "emoji_vlm/target"
    assert str(folder) not in (tmp_path / "few.json").read_text(), "where the halves lay"
    adapters = load_file(tmp_path / "few" / ADAPTERS)
    again = with_adapters(start, adapters)
    assert again.keys() == state.keys() and "vision_tower.mean" not in adapters
    for name, tensor in state.items():
        moved = (tensor - start[name]).norm() if f"{name}.up" in adapters else 0.0
        assert (again[name].float() - tensor.float()).norm() <= 0.1 * moved, "rank 2, up to rounding"


def test_transformers_own_processor_and_model_agree_with_our_loop(made):
    """On a picture behind the words: the same ids and the same scores."""
    folder = made[0] / "run" / "finetune"
    files = json.loads((folder / "processor_config.json").read_text())
    assert (files["vision_feature_select_strategy"], files["num_additional_image_tokens"]) == ("full", 0)
    text = f"<|im_start|>user\n{QUESTION}<image><|im_end|>\n<|im_start|>assistant\n"
    picture = Image.open(made[0] / "0.png")
    theirs = AutoProcessor.from_pretrained(folder)(images=picture, text=text, return_tensors="pt")
    model, ours = LlavaForConditionalGeneration.from_pretrained(folder).eval(), load_processor(folder)
    read = recipe(made[0])["stages"]["answers"]
    data, form = ConversationData(**read["data"]), PromptFormat(**read["format"])
    files = [data.path]
    dataset = ConversationDataset(data, form, ours, files=files, skipped_log=None, cache=made[0] / "cache")
    request, _ = dataset.request(0)
    assert request.ids.tolist() == theirs.input_ids[0].tolist()
    torch.testing.assert_close(request.pixels, theirs.pixel_values)
    target = LlavaTarget(model, num_token_ids=ours.num_token_ids, image_token_id=ours.image_token_id)
    scores = target.prefill(request, Taps(), capacity=4)[1].logits[-1]
    allowed = torch.isfinite(scores)
    assert int(allowed.sum()) == ours.num_token_ids - 1
    torch.testing.assert_close(scores[allowed], model(**theirs).logits[0, -1][allowed], atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_the_teacher_reads_the_text_and_the_answer_is_to_the_picture(made):
    """As the language model by itself writes it; a record without text is left out."""
    folder, _, _, _ = made
    reader = ShardReader(folder / "run" / "answers" / SHARDS)
    model = AutoModelForCausalLM.from_pretrained(folder / "lm").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder / "lm")
    for (_, tensors, info), name in zip(reader, NAMES[:-1], strict=False):
        turn = f"<|im_start|>user\n{QUESTION}{{}}<|im_end|>\n<|im_start|>assistant\n"
        asked = tokenizer(turn.format(f"a {name} (thing: nice)"), return_tensors="pt").input_ids
        ids = tensors["ids"].tolist()
        scores = model(torch.cat([asked, torch.tensor([ids])], 1)).logits[0, asked.shape[1] - 1 : -1]
        assert scores.argmax(-1).tolist() == ids and info["stop"] in ("eos", "length")
        assert tokenizer.decode(tensors["prompt"]) == turn.format("")
        best = scores.log_softmax(-1).max(-1).values
        torch.testing.assert_close(tensors["top_log_probs"][:, 0], best, atol=2e-2, rtol=0)
    assert reader[len(NAMES) - 1][2]["stop"] == SKIPPED
    listed = (folder / "run" / "answers" / "skipped.jsonl").read_text()
    assert "told holds 0 texts for 1 pictures" in listed
    steps = [json.loads(line) for line in (folder / "run" / "distilled" / "metrics.jsonl").open()]
    assert any(row.get("alpha", 0) > 0 for row in steps), "it compares with what was kept"


def rewrite(stage, changes, *, last=None):
    """The answers of a stage with other information about each, and other `last` tokens."""
    reader = ShardReader(stage / SHARDS)
    identity = reader.identity
    samples = [(key, tensors, info | change) for (key, tensors, info), change in zip(reader, changes, strict=True)]
    for (_, tensors, _), token in zip(samples, last or (), strict=last is not None):
        tensors["ids"][-1:] = token
    shutil.rmtree(stage / SHARDS)
    claim(stage / SHARDS, identity)
    write_shard(stage / SHARDS, 0, iter(samples), {SKIPPED: 1})
    finish(stage / SHARDS, identity, num_shards=1)
    list_anew(stage)


def test_loops_words_and_openings_leave_the_order_by_reason(made, monkeypatch):
    """Answers that are rewritten: one loops, one names a pear, three begin alike, of which two may."""
    folder, _, _, run = made
    again = folder / "again"
    shutil.copytree(folder / "run", again)
    for name in ("finetune", "distilled"):
        shutil.rmtree(again / name)
    texts = ["a red cat, a red cat", *["It is a thing."] * 4, ""]
    texts[3] = "A 'pear's' skin."
    rewrite(again / "answers", [{"text": text} for text in texts])
    answers = "stages.finetune.answers={from: answers, loops: skip, openings: 2, without: [pear]}"
    monkeypatch.setattr(on_records, "_ROUNDING", 0.0)
    said = "\n".join(run(again, answers, stages=["finetune"]))
    assert "2 samples" in said and "rounding the merged weights moves them by 0.0% of what the adapters add" in said
    listed = [json.loads(line) for line in (again / "finetune" / "skipped.jsonl").open()]
    reasons = {row["record"]: row["reason"] for row in listed}
    assert reasons.keys() == {0, 3, 4, 5}
    assert all(f"(answers.{key})" in reasons[n] for n, key in ((0, "loops"), (3, "without"), (4, "openings")))
    lengths = SimpleNamespace(reader=[(None, {"ids": [7] * count}, {}) for count in (3, 4)])
    (reason,) = Answers.unwanted(lengths, AnswersConfig(longest=3)).items()
    assert reason == (1, "the target's answer has more than 3 tokens (answers.longest)")


def test_an_evaluation_has_a_table_of_what_the_target_owes_to_pictures(made):
    """Of right answers those that came to their ends and do not loop."""
    folder, again = made[0], made[0] / "sight"
    shutil.copytree(folder / "run", again)
    texts = ["A cat.", "A red cat, a red cat.", "A dog.", "A cup.", "A tree.", ""]
    rewrite(again / "answers", [{"text": text} for text in texts], last=[2, 2, 9, 2, 2, 9])
    read = {key: recipe(folder)["stages"]["caption"][key] for key in ("data", "format")}
    answers = {"from": "answers", "loops": "skip"}
    sight = {"names": {"six": read["data"]}, "questions": read["data"], "answers": answers, "candidates": 4}
    whole = recipe(folder)
    whole["stages"]["gates"] = {
        "kind": "evaluate", "format": read["format"], "benchmarks": {"six": {"data": read["data"]}},
        "methods": {"lookup": {"drafter": {"kind": "ngram"}}}, "max_new_tokens": 4,
        "probes": {"sight": sight, "swapped": True},
    }  # fmt: skip
    runner(lambda: whole, "gates")[1](again, stages=["gates"])
    report = json.loads((again / "gates" / "report.json").read_text())
    tables = {one["name"]: one["tables"][0]["rows"] for one in report["sections"] if one["tables"]}
    counts = {(what, on): n for what, on, n, _ in tables["sight"]}
    assert counts["the right name is the likeliest of 4, prior taken off", "six"] == 6
    assert counts["right answers, right - another's picture", "naming"] == 3
    assert counts["its own answers: mean p_max", "all"] == 6
    gains = [gain for row in tables["swapped"] for gain in row[-2:]]
    assert gains and all(gain == [0, 0, 0] for gain in gains), "lookup reads no picture"
    assert (again / "gates" / "swapped.png").is_file()


def contrast(folder, **changes):
    read = {key: recipe(folder)["stages"]["caption"][key] for key in ("data", "format")}
    return {"kind": "contrast", **read, **changes}


def test_a_contrast_gives_pictures_the_words_of_their_records_and_norms_the_tower(made):
    folder = made[0]
    records = json.loads((folder / "data.json").read_text())
    words = {name: [name, name.split()[1], name[::-1], name.split()[0]] for name in NAMES}
    (folder / "words.json").write_text(json.dumps([one | {"words": words[one["id"]]} for one in records]))
    settings = contrast(folder, steps=400, batch_size=6, lr=2e-2, dropout=0.0)
    settings["data"]["path"] = str(folder / "words.json")
    _, run = runner(lambda: recipe(folder) | {"stages": {"contrast": settings}}, "contrast")
    run(folder / "contrast")
    model = LlavaForConditionalGeneration.from_pretrained(folder / "contrast" / "contrast").eval()
    processor = load_processor(folder / "contrast" / "contrast")
    tokenizer, table = processor.tokenizer, model.get_input_embeddings().weight.detach()
    wanted = torch.stack([
        torch.stack([table[tokenizer(f" {text}").input_ids].mean(0) for text in words[name]]) for name in NAMES
    ])  # fmt: skip
    pixels = torch.cat([tile_pixels([Image.open(folder / f"{n}.png")], processor) for n in range(len(NAMES))])
    with torch.no_grad():
        states = model.model.vision_tower(pixels).last_hidden_state[:, 0, :-4]
        places = model.model.multi_modal_projector(selected_features(model, pixels)) - wanted.mean(0)
    torch.testing.assert_close(states.mean(0), torch.zeros(states.shape[1]), atol=1e-3, rtol=0)
    spread = (wanted - wanted.mean(0)).norm(dim=-1).mean() * 1.3
    assert 0.8 < places.norm(dim=-1).mean() / spread < 1.2, places.norm(dim=-1).mean() / spread
    scores = torch.einsum("bpd,cpd->bc", F.normalize(places, dim=-1), F.normalize(wanted - wanted.mean(0), dim=-1))
    assert scores.argmax(1).tolist() == list(range(len(NAMES)))
    lm = weights(folder / "lm")
    assert torch.equal(model.state_dict()["model.language_model.norm.weight"], lm["model.norm.weight"])


def test_a_contrast_wants_a_text_for_each_place(made, tmp_path):
    _, run = runner(lambda: recipe(made[0]) | {"stages": {"contrast": contrast(made[0])}}, "contrast")
    fails_with("should be 4 texts", run, tmp_path)


def test_a_contrast_follows_its_seed(made):
    folder, projectors = made[0], []
    settings = contrast(folder, steps=1, batch_size=6)
    settings["data"] = settings["data"] | {"path": str(folder / "words.json")}
    _, run = runner(lambda: recipe(folder) | {"stages": {"contrast": settings}}, "contrast")
    for number, seed in enumerate((0, 0, 1)):
        run(folder / f"seed{number}", f"seed={seed}")
        loaded = weights(folder / f"seed{number}" / "contrast")
        projectors.append(next(value for name, value in loaded.items() if name.endswith("linear_1.weight")))
    assert torch.equal(projectors[0], projectors[1]) and not torch.equal(projectors[0], projectors[2])
