"""Whatever stands in a data file, it is read, listed with its reason, or a `UserError` names it: drawn records."""

import json
import shutil

from draftsmith.core.errors import UserError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_records import talk

FEW = {"deadline": None, "derandomize": True, "database": None, "suppress_health_check": list(HealthCheck)}
TEXTS = st.one_of(
    st.text(max_size=12), st.sampled_from(["<image>", "<image>\nWhich?", "<video>", "It is 3.", "\ud800"])
)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | TEXTS
ANYTHING = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3), max_leaves=5
)
FILES = st.sampled_from(["images/1.png", "images/2.png", "images/none.png", "images", "../data.json", "/etc/hostname"])
TURNS = st.fixed_dictionaries(
    {},
    optional={"from": st.sampled_from(["human", "gpt", "system", "tool"]) | ANYTHING, "value": TEXTS | ANYTHING,
              "tool_calls": ANYTHING, "reasoning": TEXTS | ANYTHING},
)  # fmt: skip
RECORDS = st.fixed_dictionaries(
    {"conversations": st.lists(TURNS | ANYTHING, max_size=4) | ANYTHING},
    optional={"id": TEXTS | ANYTHING, "image": FILES | st.lists(FILES, max_size=3) | ANYTHING, "video": ANYTHING,
              "tools": ANYTHING, "chat_template_kwargs": ANYTHING},
)  # fmt: skip
GOOD = {"id": "good", "image": "images/1.png", "conversations": talk("<image>\nWhich?", "It is picture 1.")}


def read_all(open_data, path, on_error: str) -> int:
    """Reads every sample. Returns how many there are, 0 where a `UserError` was raised, which must name the file."""
    shutil.rmtree(path.parent / "run", ignore_errors=True)
    count, told = 0, path.name
    try:
        dataset = open_data(path, max_length=64, on_error=on_error)
        for index in range(len(dataset)):
            sample = dataset[index]
            assert len(sample.ids) == len(sample.loss_mask) <= 64
        count = len(dataset)
    except UserError as error:
        told = str(error)
    assert path.name in told
    return count


def records_hold(folder, open_data, count: int) -> None:
    @settings(max_examples=count, **FEW)
    @given(st.lists(RECORDS | ANYTHING, min_size=1, max_size=3), st.booleans(), st.sampled_from(["strict", "skip"]))
    def hold(rows, lines, on_error):
        rows = [GOOD, *rows]
        path = folder / ("data.jsonl" if lines else "data.json")
        path.write_text("\n".join(map(json.dumps, rows)) if lines else json.dumps(rows))
        kept = read_all(open_data, path, on_error)
        # A bad record takes no good one with it.
        assert on_error == "strict" or kept

    hold()


def test_any_records(folder, open_data):
    records_hold(folder, open_data, 80)


def test_any_bytes(folder, open_data):
    """A good file with a few bytes changed, or cut off."""
    good = b"\n".join(json.dumps(GOOD).encode() for _ in range(4))

    @settings(max_examples=50, **FEW)
    @given(st.lists(st.tuples(st.integers(0, len(good) - 1), st.integers(0, 255)), max_size=4), st.integers(0, 40))
    def hold(changes, cut):
        data = bytearray(good)
        for place, value in changes:
            data[place] = value
        path = folder / "data.jsonl"
        path.write_bytes(bytes(data[: len(data) - cut]))
        for on_error in ("strict", "skip"):
            read_all(open_data, path, on_error)

    hold()
