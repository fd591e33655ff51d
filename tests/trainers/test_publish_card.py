"""What a model card says: of which rows, of whose output, of which target, under which terms."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from draftsmith.core.errors import UserError
from draftsmith.eval.cells import RELAXED, MethodInfo
from draftsmith.eval.published_section import PublishedSection, UserRequest
from draftsmith.eval.report import build, write
from draftsmith.eval.tables import html_page
from draftsmith.models.targets.llava.section import LlavaTargetConfig
from draftsmith.recipes.config.schema import AnyTarget
from draftsmith.trainers.publish.card import CardFacts, Evaluated, front_matter, model_card, read_evaluation
from draftsmith.trainers.publish.decoding import _target
from draftsmith.trainers.publish.folder import copy_provenance, copy_report, without_places
from draftsmith.trainers.publish.fresh import Snippet
from draftsmith.trainers.publish.lineage import (
    Trained,
    chain,
    own_licence,
    parts_of,
    sources_of,
    target_name,
    warnings,
)
from draftsmith.trainers.stages.publish import _target_on_hub, _task
from markdown_it import MarkdownIt
from PIL import Image
from pydantic import TypeAdapter
from rows import a_row, random_rows

LLAVA, HUB = "llava-hf/llava-1.5-7b-hf", "https://huggingface.co"


def facts(**changes) -> CardFacts:
    """Of a head for LLaVA-1.5."""
    asked = PublishedSection(target={"kind": "llava", "path": LLAVA, "revision": "abc", "dtype": "bfloat16"},
                             drafter={"kind": "eagle3"}, prompt={"text": "What?"},
                             decoding={"name": "E", "tree": {"kind": "chain", "gamma": 3}})  # fmt: skip
    known = {
        "repo": "me/EAGLE3-llava", "method": "eagle3", "task": "image-text-to-text", "target": LLAVA,
        "target_name": "`mine`", "base": None,
        "links": chain([("target", LLAVA), ("data", "my own.json")]), "license": None, "languages": ["en"],
        "datasets": ["org/set"], "training": [], "evaluated": Evaluated("Best tau: 2.00 (E, seen).", [], {}, []),
        "plots": [], "section": asked, "snippets": [],
    }  # fmt: skip
    return CardFacts(**known | changes)


def test_what_a_heads_card_begins_with():
    fields = front_matter(facts())
    assert fields["base_model"] == LLAVA and fields["base_model_relation"] == "adapter"
    assert fields["license"] == "llama2" and fields["library_name"] == "draftsmith"
    assert fields["datasets"] == ["org/set"]
    assert {"speculative-decoding", "eagle3", "image-text-to-text"} <= set(fields["tags"])
    body = model_card(facts())
    assert "Llama 2" in body and "`my own.json` is not known" in body and "at revision `abc`" in body


METHODS = {"M": MethodInfo("mine", "M"), "relaxed": MethodInfo("mine", rule="lantern"),
           "seeds": MethodInfo("mine, two"), "sibling": MethodInfo("other")}  # fmt: skip


def evaluation(folder: Path, *names: str) -> Path:
    """A report whose best row is another drafter's, and whose next best one by a relaxed rule."""
    accepted = {"M": (1, 0, 1), "relaxed": (3, 3, 3), "seeds": (2, 1, 1), "sibling": (4, 4, 4)}
    rows = [
        a_row(method=name, drafter="other" if name == "sibling" else drafter, accepted=accepted[name], request=f"r{n}")
        for name in names
        for drafter in (("mine", "two") if name == "seeds" else ("mine",))
        for n in range(2)
    ]
    write(folder, build(rows, about={"device": "CPU"}, methods=METHODS), rows)
    return folder


def test_a_cards_headline_is_its_own_drafters(tmp_path):
    """It was the best row of the whole report: "Best tau: 4.00 (draft LVLM, M)" on the card of a head."""
    evaluated = read_evaluation(evaluation(tmp_path, "M", "sibling"), "mine")
    assert evaluated.headline.startswith("Best tau: 1.67 (M, ") and evaluated.methods == ("M",)
    assert not any("sibling" in line for line in [*evaluated.findings, *evaluated.table])
    assert any("| sibling |" in line for line in evaluated.others)
    body = model_card(facts(evaluated=evaluated))
    assert body.index("Best tau: 1.67") < body.index("| M |") < body.index("Other drafters") < body.index("| sibling |")


def test_a_card_has_lengths_by_category_where_sets_have_categories(tmp_path):
    """As SPEED-Bench counts them: K by method, each turn alike, at both temperatures."""
    rows = [
        a_row(method=f"chain of {k}", drafter="mine", accepted=accepted, request=f"{category} {turn}", temperature=heat,
              details={"category": category, "turn": turn})
        for k, heat in ((3, 0.0), (5, 0.0), (5, 1.0))
        for category in ("coding", "roleplay")
        for turn, accepted in enumerate(((k, 0), (1,)))
    ]  # fmt: skip
    methods = {row.method: MethodInfo("mine") for row in rows}
    write(tmp_path, build(rows, about={"device": "CPU"}, methods=methods), rows)
    body = model_card(facts(evaluated=read_evaluation(tmp_path, "mine")))
    assert "| benchmark | category | chain of 3, T = 0 | chain of 5, T = 0 | chain of 5, T = 1 |" in body
    assert "| photos | coding | 2.25 | 2.75 | 2.75 |" in body and "| photos | roleplay | 2.25" in body


def test_a_row_over_several_drafters_counts_this_one_alone(tmp_path):
    evaluated = read_evaluation(evaluation(tmp_path, "seeds"), "two")
    cells = json.loads((tmp_path / "report.json").read_text())["cells"]
    assert cells[0]["requests"] == 2 and cells[0]["answers"] == 4 and cells[0]["drafters"] == ["mine", "two"]
    assert any("| seeds | 0 | 2 |" in line for line in evaluated.table) and evaluated.others == []


def test_a_report_without_a_row_of_the_drafter_is_refused(tmp_path):
    with pytest.raises(UserError, match="no row of the drafter of stage 'mine'") as caught:
        read_evaluation(evaluation(tmp_path, "sibling"), "mine")
    assert caught.value.where == str(tmp_path / "report.json") and "report=STAGE" in caught.value.hint


PROMISE = "so the output stays the target's; the speedup"


def test_a_card_does_not_promise_the_targets_output_beside_a_relaxed_rule(tmp_path):
    exact = read_evaluation(evaluation(tmp_path / "exact", "M", "sibling"), "mine")
    assert PROMISE in model_card(facts(evaluated=exact)) and RELAXED not in model_card(facts(evaluated=exact))
    relaxed = read_evaluation(evaluation(tmp_path / "relaxed", "M", "relaxed"), "mine")
    body = model_card(facts(evaluated=relaxed))
    assert PROMISE not in body and f"(relaxed). {RELAXED}" in body and f"- {RELAXED}" in body
    assert "| lantern (relaxed) |" in body and "| exact |" in body and "LANTERN" not in body
    assert relaxed.headline.startswith("Best tau: 1.67 (M, "), "the best exact row"
    others = evaluation(tmp_path / "others", "relaxed", "sibling")
    assert PROMISE not in model_card(facts(evaluated=read_evaluation(others, "other"))), "of another's rows, too"


@pytest.mark.parametrize(("target", "task"), [
    ({"kind": "causal_lm", "path": "a/b"}, "text-generation"),
    ({"kind": "llava", "path": "a/b"}, "image-text-to-text"),
    ({"kind": "llamagen", "size": "B", "condition": "text", "vq": "vq", "text_encoder": "t5"}, "text-to-image"),
    ({"kind": "llamagen", "size": "B", "condition": "class", "vq": "vq"}, "image-generation"),
])  # fmt: skip
def test_the_tag_is_what_the_target_does(target, task):
    """A head of a text-only target was tagged image-text-to-text, one that draws classes text-to-image."""
    assert _task(TypeAdapter(AnyTarget).validate_python(target)) == task
    assert facts(task=task) and task in front_matter(facts(task=task))["tags"]


def test_what_a_target_without_a_hub_id_is_called(tmp_path):
    """One that is named by its path was "a target of its own run"."""

    def context(path, **inputs):
        return SimpleNamespace(target=SimpleNamespace(path=path), inputs=inputs)

    assert target_name(context(str(tmp_path / "mine"))).startswith("`mine`, a target that is not on the Hub")
    assert target_name(context(None, target=tmp_path)) == "a target that its run trained"
    assert target_name(context(LLAVA, target=tmp_path)) == f"a target that its run trained, from `{Path(LLAVA).name}`"
    stage = SimpleNamespace(base_model=None)
    assert _target_on_hub(stage, context(LLAVA)) == LLAVA
    assert _target_on_hub(stage, context(LLAVA, target=tmp_path)) is None, "the Hub has it as it was before"
    assert _target_on_hub(SimpleNamespace(base_model="me/tuned"), context(LLAVA, target=tmp_path)) == "me/tuned"
    assert "drafts tokens for `mine`." in model_card(facts(target=None))


def test_a_manifest_does_not_name_a_target_that_the_run_trained_on():
    """open_published would load the weights from before, at their revision."""
    section = TypeAdapter(AnyTarget).validate_python({"kind": "llava", "path": LLAVA, "revision": "abc"})
    assert _target(section, None, None)["path"] == LLAVA and _target(section, None, None)["revision"] == "abc"
    for base, trained, named in ((None, "tuned", "tuned"), ("me/tuned", "tuned", "me/tuned")):
        values = _target(section, base, trained)
        assert values["path"] == named and values["revision"] is None


def test_licences_that_the_hub_has_no_word_for():
    qwen = "Qwen/Qwen2.5-VL-3B-Instruct"
    fields = front_matter(facts(target=qwen, links=chain([("target", qwen)])))
    assert fields["license"] == "other" and fields["license_name"] and fields["license_link"] == f"{HUB}/{qwen}"
    unknown = front_matter(facts(target="a/b", links=chain([("target", "a/b")])))
    assert "license" not in unknown


def test_weights_that_restrict_more_than_the_target_are_in_front():
    """A draft that began as JackFram/llama-160m, of other terms, was apache-2.0 as its target is."""
    target, base = "llava-hf/llava-onevision-qwen2-7b-ov-hf", "JackFram/llama-160m"
    fields = front_matter(facts(method="lvlm", links=chain([("target", target), ("initial weights", base)])))
    assert fields["license"] == "other" and fields["license_name"] == "as-of-its-parts"
    open_base = chain([("target", target), ("initial weights", "JackFram/llama-68m")])
    assert front_matter(facts(method="lvlm", links=open_base))["license"] == "apache-2.0"


def test_names_on_a_card_show_letter_by_letter(tmp_path):
    name = "x|<img src=x onerror=alert(1)> [in](https://evil.example)\n# `y` <!--"
    trained = Trained(name, name, name, name, 1, name, 1.0, "1.00 h")
    seen = Evaluated(name, [], {name: name}, [], relaxed=(name,))
    asked = facts().section.model_copy(update={"prompt": UserRequest(text=name)})
    body = model_card(facts(training=[trained], evaluated=seen, target=None, target_name=f"`{name}`", base=None,
                            links=chain([(name, name)]), section=asked, plots=[f"{name}.png"],
                            snippets=[Snippet("Load it", f"print('''\n```\n{name}''')")]))  # fmt: skip
    tokens = MarkdownIt("commonmark").enable("table").parse(body.split("---\n", 2)[2])
    inner = [child for token in tokens for child in token.children or ()]
    kinds = [token.type for token in (*tokens, *inner)]
    links = [child.attrs["href"] for child in inner if child.type == "link_open"]
    assert "html_block" not in kinds and "html_inline" not in kinds and not any("evil" in link for link in links)
    assert kinds.count("fence") == 1 and sum(t.type == "heading_open" and t.tag == "h1" for t in tokens) == 1


def test_a_target_that_ships_keeps_its_name_and_its_terms():
    """The card called it a target that is not on the Hub, of an unknown licence, and gave it to `open_published`."""
    section = LlavaTargetConfig(kind="llava", path="shipped:shapes-llava")
    context = SimpleNamespace(target=section, inputs={"processor": Path("world")})
    assert target_name(context) == "`shipped:shapes-llava`, which comes with draftsmith"
    assert sources_of(context, None) is None, "the manifest's name opens it"
    assert sources_of(context, "me/target") == {"target": Path(section.path), "processor": Path("world")}
    links = chain(parts_of(context, None, None, (), ()))
    assert [(link.name, link.licence.id) for link in links] == [("shipped:shapes-llava", "apache-2.0")]
    assert not [*warnings(links)] and own_licence(links, None).id == "apache-2.0"
    trained = SimpleNamespace(target=section, inputs={"target": Path("x")})
    assert target_name(trained).endswith("from `shipped:shapes-llava`")


# Folders of the machine that it was made on, and who works there, are not told


HOME = "/home/alice"


@pytest.mark.parametrize(("text", "shown"), [
    (f"{HOME}/data/mine.json", "mine.json"),
    ("/data/Alice B/mine set.json", "mine set.json"),
    ("../alice/mine.json", "mine.json"),
    ("~/mine/data.json", "data.json"),
    (HOME, "~"),
    ("/Users/alice/", "~"),
    (f"train.py recipe={HOME}/r.yaml 'output=/scratch/alice/x' data=[/a/b.json,/c/d.json]",
     "train.py recipe=r.yaml 'output=x' data=[b.json,d.json]"),
    (f"- suite: {HOME}/sets, rows: all", "- suite: sets, rows: all"),
    (f"file://{HOME}/x", "file://~/x"),
])  # fmt: skip
def test_paths_are_cut_to_their_last_name(text, shown):
    assert without_places(text) == shown


@pytest.mark.parametrize("text", [
    "llava-hf/llava-1.5-7b-hf", "data/coco/{00000..00010}.tar", "https://huggingface.co/a/b/c", "tokens/s",
    "![a](report/a.png)", "tau / (gamma T_q/T_p + 1)", "2026/11/21", "</s>", "a /s", "USER: <image>\nWhat?",
])  # fmt: skip
def test_what_only_has_a_slash_is_kept(text):
    assert without_places({"a": [text, 1, None]}) == {"a": [text, 1, None]}


def test_recipe_and_report(tmp_path):
    """Through the functions that write the folder and read the card's tables."""
    run, folder = tmp_path / "run", tmp_path / "folder"
    (run / "evaluate" / "suite").mkdir(parents=True)
    folder.mkdir()
    about = {"command": f"train.py output={HOME}/run", "suite": f"{HOME}/sets, prompts verbatim", "gamma": 5}
    rows = random_rows(2, drafter="head", method="M", benchmark=f"{HOME}/sets")
    built = build(rows, about=about, methods={"M": MethodInfo("head")}, warnings=[f"read from {HOME}/sets"])
    write(run / "evaluate", built, rows)
    private = "## Examples\n\n> `alice`\n\n"
    (run / "evaluate" / "report.md").write_text(f"- read from {HOME}/sets\n\n{private}## How\n\n![a](a.png)\n")
    Image.effect_noise((40, 40), 90).save(run / "evaluate" / "a.png")
    (run / "evaluate" / "suite" / "a.json").write_text(json.dumps([f"{HOME}/a b.json"]))
    (run / "run.yaml").write_text(f"command: train.py output={HOME}/run\npid: 7\n")
    copy_report(run / "evaluate", folder)
    copy_provenance(run, {"output": f"{HOME}/run", "target": {"path": "org/name"}}, folder)
    for path in folder.rglob("*.*"):
        assert b"alice" not in path.read_bytes(), path
    page = html_page("- read from sets\n\n## How\n\n![a](a.png)\n", run / "evaluate")
    assert (folder / "report" / "report.html").read_text() == page, "with the picture as it was: base64 is no path"
    assert json.loads((folder / "report" / "report.json").read_text())["about"]["gamma"] == 5
    assert "path: org/name" in (folder / "recipe.yaml").read_text()
    result = read_evaluation(run / "evaluate", "head")
    assert result.about["suite"] == "sets, prompts verbatim" and result.findings[-1] == "- **Warning**: read from sets."
    assert HOME not in str(result)
