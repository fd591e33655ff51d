"""Whatever stands in a recipe, it loads, or a `UserError` says why not: changes of good recipes, and drawn ones."""

import contextlib
import io
import json
from pathlib import Path

import pytest
import yaml
from draftsmith.core.errors import UserError
from draftsmith.recipes.config.dry_run import dry_run
from draftsmith.recipes.config.load import load
from draftsmith.recipes.config.plan import plan
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parents[2]
BASES = {name: yaml.safe_load((ROOT / f"tests/tools/attempts/{name}.yaml").read_text()) for name in ("lvlm", "visual")}
KINDS = ["generate", "encode", "regenerate", "cache", "train", "evaluate", "publish", "llava", "llamagen", "eagle", "x"]
# Everything that YAML can hold, with the words of recipes among it.
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8),
    st.sampled_from([*KINDS, "../x", "/etc/passwd", "${seed}", "${oc.env:HOME}", "null", "8-3-3", "target"]),
)  # fmt: skip
WORDS = ["kind", "path", "data", "from", "steps", "batch_size", "optim", "lr", "format", "methods", "drafter", "tree"]
KEYS = st.one_of(st.text(max_size=6), st.sampled_from(WORDS))
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4), max_leaves=6
)
FEW = {"deadline": None, "derandomize": True, "database": None, "suppress_health_check": list(HealthCheck)}


def places(tree, keys=()):
    """Every place of a tree by its keys."""
    inner = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [place for key, value in inner for place in [(*keys, key), *places(value, (*keys, key))]]


@st.composite
def changed(draw):
    """A good recipe with one to three of its values, keys or sections put in another's place, or taken away."""
    tree = json.loads(json.dumps(BASES[draw(st.sampled_from(sorted(BASES)))]))
    for _ in range(draw(st.integers(1, 3))):
        *path, last = draw(st.sampled_from(places(tree) or [("target",)]))
        section = tree
        for key in path:
            section = section[key]
        how = draw(st.sampled_from(["value", "value", "add", "drop"]))
        if how == "drop":
            del section[last]
        elif how == "add" and isinstance(section, dict):
            section[draw(KEYS)] = draw(VALUES)
        else:
            section[last] = draw(VALUES)
    return tree


def text_of(tree) -> str:
    """As JSON's writer spells it, which YAML reads: odd strings, and infinities by YAML's names."""
    return json.dumps(tree).replace("-Infinity", "-.inf").replace("Infinity", ".inf").replace("NaN", ".nan")


def only_user_errors(folder: Path, text: str, *more: str) -> None:
    path = folder / "drawn.yaml"
    path.write_text(text)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(UserError):
        loaded = load([f"recipe={path}", f"output={folder / 'run'}", *more])
        dry_run(loaded.recipe, plan(loaded.recipe, loaded.path), loaded.options.stages)
    assert sorted(folder.iterdir()) == [path], "a dry run wrote something"


def holds_for(folder: Path, trees, count: int) -> None:
    @settings(max_examples=count, **FEW)
    @given(trees)
    def hold(tree):
        only_user_errors(folder, text_of(tree))

    hold()


def test_changes_of_good_recipes(tmp_path):
    holds_for(tmp_path, changed(), 30)


def test_anything(tmp_path):
    trees = st.fixed_dictionaries({}, optional={key: VALUES for key in ("target", "drafter", "stages", "output")})
    holds_for(tmp_path, trees | VALUES, 40)


def test_any_setting_of_the_command_line(tmp_path):
    dotted = st.sampled_from([".".join(map(str, keys)) for keys in places(BASES["lvlm"])])

    @settings(max_examples=25, **FEW)
    @given(dotted | st.text(max_size=20), VALUES.map(text_of) | st.text(max_size=12))
    def hold(key, value):
        only_user_errors(tmp_path, text_of(BASES["lvlm"]), f"{key}={value}")

    hold()


@pytest.mark.slow
def test_many_changes_of_good_recipes(tmp_path):
    holds_for(tmp_path, changed(), 3000)
