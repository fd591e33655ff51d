"""A family of pictures of another package, from a record to accepted tokens and a trained head.

Its processor's files and its model are transformers' own, and so are the ids, pixels and scores that it is held to.
"""

import copy
import json
from dataclasses import replace
from types import SimpleNamespace

import family_checks as family
import pytest
import torch
from command_line import prints
from decodings import as_plain, greedy
from draftsmith.core.states import Taps
from draftsmith.data.collate import collate
from draftsmith.data.conversations import PromptFormat
from draftsmith.data.dataset import ConversationData, ConversationDataset
from draftsmith.data.families.llava import LLAVA
from draftsmith.data.families.processor import Resizing, pil
from draftsmith.data.processor_files import load_processor
from draftsmith.data.shapes.tokenizer import train_tokenizer
from draftsmith.eval.loop import generate
from draftsmith.eval.pair import open_pair
from draftsmith.eval.policies import Chain, Dynamic
from draftsmith.models.drafters.eagle import EagleConfig
from draftsmith.models.formats.export import export_drafter
from draftsmith.models.targets.table import training_of
from fails import fails_with
from own_family import FAKE, IDEFICS, WHOLE, IdeficsTargetConfig
from PIL import Image
from safetensors.torch import load_file
from stages_run import load_spelled, run_loaded
from states_run import WORDS, context, losses, stage
from transformers import Idefics3Config, Idefics3ForConditionalGeneration, Idefics3Processor, LlamaConfig
from transformers.models.idefics3.configuration_idefics3 import Idefics3VisionConfig

TILE, PATCH = 16, 4  # pixels; 2 x 2 tokens a tile, and up to 4 x 4 tiles
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ 'User:' if m.role == 'user' else 'Assistant: ' }}"
    "{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{{ p.text if p.type == 'text' else '<image>' }}{% endfor %}{% endif %}"
    "{{ '</s>' if m.role == 'assistant' else '\n' }}{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)
FORM = {"template": "chat", "image_rule": "verbatim"}
EAGLE = EagleConfig(kind="eagle")
SIZES = [(60, 20), (20, 60), (30, 30), (33, 9)]


@pytest.fixture(scope="module", name="made")
def _made(tmp_path_factory):
    """Files as transformers writes them, and records of which every other one has a picture."""
    folder = tmp_path_factory.mktemp("idefics")
    tokenizer = train_tokenizer(["User: Which? Assistant: " + " ".join(WORDS)] * 3, 400)
    places = [f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)]
    tokenizer.add_special_tokens({"additional_special_tokens": [FAKE, WHOLE, "<end_of_utterance>", *places]})
    images = pil("Idefics3")(size={"longest_edge": 4 * TILE}, max_image_size={"longest_edge": TILE})
    theirs = Idefics3Processor(images, tokenizer, image_seq_len=4, chat_template=TEMPLATE)
    theirs.save_pretrained(folder / "target")
    torch.manual_seed(0)
    text = LlamaConfig(
        vocab_size=len(tokenizer) + 3, hidden_size=32, intermediate_size=48, num_hidden_layers=3, pad_token_id=3,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.3,
    )  # fmt: skip
    vision = Idefics3VisionConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=TILE,
        patch_size=PATCH, initializer_range=0.3,
    )  # fmt: skip
    config = Idefics3Config(text_config=text, vision_config=vision, image_token_id=theirs.image_token_id)
    model = Idefics3ForConditionalGeneration(config).eval()
    model.model.connector.modality_projection.proj.weight.data *= 20  # blindness would be seen
    model.save_pretrained(folder / "target")
    records = []
    for number in range(8):
        turns = [{"from": "human", "value": "Which?"}, {"from": "gpt", "value": " ".join(WORDS[number : number + 4])}]
        record = {"id": str(number), "conversations": turns}
        if number % 2:
            turns[0]["value"] = "<image>Which?"
            left = Image.linear_gradient("L").resize(SIZES[number // 2])
            Image.merge("RGB", [left, left.rotate(90 * number), left.rotate(180)]).save(folder / f"{number}.png")
            record["image"] = f"{number}.png"
        records.append(record)
    (folder / "data.json").write_text(json.dumps(records))
    section = IdeficsTargetConfig(kind="own_family:IdeficsTargetConfig", path=str(folder / "target"))
    data = {"path": str(folder / "data.json"), "max_length": 256}
    pair = open_pair(section, {}, device=torch.device("cpu"))
    samples = ConversationDataset(
        ConversationData(**data), PromptFormat(**FORM), pair.processor, files=[data["path"]], skipped_log=None,
        cache=folder / "index",
    )  # fmt: skip
    banned = torch.tensor(pair.target.decoder.banned)
    return SimpleNamespace(
        folder=folder, theirs=theirs, model=model, target=section, records=records, data=data, pair=pair,
        samples=samples, banned=banned,
    )  # fmt: skip


def read_by_theirs(made, number: int) -> dict:
    """A record's prompt as transformers' own processor reads it."""
    record = made.records[number]
    images = [[Image.open(made.folder / record["image"])]] if "image" in record else None
    text = f"<s>User:{record['conversations'][0]['value']}\nAssistant:"
    return dict(made.theirs(text=[text], images=images, add_special_tokens=False, return_tensors="pt"))


@torch.no_grad()
def plain(made, given: dict, ids: torch.Tensor) -> torch.Tensor:
    """[V] of the last token, by one forward over all ids that keeps nothing."""
    more = {"input_ids": ids[None], "attention_mask": torch.ones_like(ids[None]), "use_cache": False}
    return made.model(**given | more).logits[0, -1].index_fill(0, made.banned, float("-inf"))


@pytest.mark.parametrize("number", range(8))
def test_a_record_becomes_the_ids_and_pixels_of_transformers_processor(made, number):
    (asked, _), given = made.samples.request(number), read_by_theirs(made, number)
    assert asked.ids.tolist() == given["input_ids"][0].tolist()
    if number % 2 == 0:
        assert asked.pixels is None and not asked.pictures
        return
    assert torch.equal(asked.pixels, given["pixel_values"][0])
    (picture,) = asked.pictures
    assert picture.num_tiles == len(asked.pixels) > 1
    assert int((asked.modality != 0).sum()) == picture.num_tokens == 4 * picture.num_tiles


def test_its_files_are_read_as_it_saves_them(made, tmp_path):
    saved = made.pair.processor
    saved.save(tmp_path)
    again = load_processor(tmp_path, family=IDEFICS)
    assert (again.image_size, again.patch_size, again.tokenizer_hash) == (TILE, TILE // 2, saved.tokenizer_hash)


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("chunk", [None, 7])
def test_greedy_answers_are_those_of_forwards_over_the_whole_sequence(made, number, chunk):
    own = made.target.model_copy(update={"prefill_chunk": chunk}).target(
        copy.deepcopy(made.model), num_token_ids=made.pair.processor.num_token_ids, image_token_id=None
    )
    (asked, _), given = made.samples.request(number), read_by_theirs(made, number)
    expected, ids = [], asked.ids
    _, step = own.prefill(asked, Taps(), capacity=1)
    torch.testing.assert_close(step.logits[-1], plain(made, given, ids), atol=1e-4, rtol=0)
    for _ in range(10):
        expected.append(int(plain(made, given, ids).argmax()))
        ids = torch.cat([ids, torch.tensor(expected[-1:])])
    assert generate(own, None, asked, greedy(Chain(1), 10)).tokens == expected
    if asked.pixels is not None:
        blind = given | {"pixel_values": -given["pixel_values"]}
        assert (plain(made, blind, asked.ids) - plain(made, given, asked.ids)).abs().nan_to_num().max() > 1e-2


def test_trees_score_as_their_paths_and_batches_as_single_requests(made):
    own, asked = made.pair.target, [made.samples.request(number)[0] for number in range(4)]
    family.check_tree(own, own, own.prefill(asked[1], Taps(), capacity=20)[0], asked[1])
    family.check_batches(own, asked)


def test_states_are_the_taps_of_a_prefill_and_what_training_sees(made):
    asked, own = [], made.pair.target
    batch = collate([made.samples[number] for number in range(4)], pad_id=3, image_size=TILE)
    for row, length in enumerate(batch.attention_mask.sum(1).tolist()):
        one, _ = made.samples.request(row)
        asked.append(family.longer(one, batch.ids[row, len(one.ids) : length].tolist()))
    states, text, _ = family.check_states(own, asked, batch, (0, 2), 2e-4)
    module = training_of(copy.deepcopy(made.model), ("projector",), gradient_checkpointing=False)
    for pixels in (batch, collate([made.samples[0]], pad_id=3, image_size=TILE)):
        loss = module(pixels).loss_sum
        loss.backward()
        assert loss > 0 and all(p.grad is not None for _, p in module.parts()["projector"])
    with torch.no_grad():
        torch.testing.assert_close(module.hidden_states(batch)[text], states.feature[text], atol=2e-4, rtol=0)


def test_a_head_is_trained_on_its_states_and_changes_no_answer(made, tmp_path):
    asked = context(made, tmp_path / "head", EAGLE)
    settings = {"source": {"kind": "online"}, "format": FORM, "held_out": 0.0}
    stage(made, steps=2, batch_size=8, micro_batch_size=8, **settings).run(asked)
    first, second = losses(asked.folder).values()
    assert second < first
    drafter = made.pair.drafter(EAGLE, asked.folder)
    for number in (0, 1, 5):
        drafted = as_plain(made.pair.target, drafter, made.samples.request(number)[0], Dynamic(8, 2, 3), 12)
        assert sum(cycle.num_drafted for cycle in drafted.cycles) > 0
    export_drafter(asked.folder, tmp_path / "theirs", "eagle", target=made.target.path, prompts="text")
    weights = load_file(tmp_path / "theirs" / "model.safetensors")
    assert torch.equal(weights["embed_tokens.weight"], made.pair.target.embedding)


def test_pictures_of_another_family_are_refused(made):
    asked, _ = made.samples.request(1)
    foreign = LLAVA.layouts([(30, 30)], made.pair.processor, Resizing())
    fails_with("cut for another family", made.pair.target.view, replace(asked, pictures=foreign))


def recipe(made) -> dict:
    data = made.data | {"images": str(made.folder)}
    return {
        "target": {"kind": made.target.kind, "path": made.target.path},
        "drafter": {"kind": "eagle"},
        "stages": {
            "states": {"kind": "cache", "format": FORM, "data": data},
            "head": {"kind": "train", "format": FORM, "source": {"kind": "cached"}, "steps": 2, "batch_size": 4,
                     "optim": {"lr": 1e-3}, "held_out": 0.0},
            "evaluate": {
                "kind": "evaluate", "format": FORM, "max_new_tokens": 6, "warmup": 0, "temperatures": [0.0],
                "benchmarks": {"seen": {"data": data | {"max_samples": 4}}},
                "methods": {"EAGLE": {"drafter": "head", "tree": "8-3-3"}},
            },
        },
    }  # fmt: skip


def test_a_recipe_of_it_is_counted_and_run(made, tmp_path, capsys):
    found = load_spelled(recipe(made), "own", tmp_path / "run")
    said = prints(capsys, [f"recipe={tmp_path / 'run' / 'own.yaml'}", "dry_run=true"])
    visual = sum(int((made.samples.request(number)[0].modality != 0).sum()) for number in range(8))
    assert f"{visual} visual tokens" in said and "vision_tower" in said
    run_loaded(found, tmp_path / "run")
    report = (tmp_path / "run" / "evaluate" / "report.md").read_text()
    assert "| seen | EAGLE | 4 | 4/4 |" in report


def test_a_dry_runs_memory(made):
    own = lambda model: made.target.target(model, num_token_ids=made.pair.processor.num_token_ids, image_token_id=None)  # noqa: E731
    family.check_memory(made.model, own)
