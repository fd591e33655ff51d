"""Arrays kept beside a run are made again where they are damaged, and that is said."""

import io
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from draftsmith.data.records import records
from draftsmith.data.records.records import read_arrays, write_arrays
from draftsmith.data.states.samples import StatesSamples
from small_records import flip


class Trap:
    def __reduce__(self):
        return pytest.fail, ("unpickled",)


def pickled(path: Path) -> None:
    np.savez(path, offsets=np.array([Trap()], dtype=object), counts=np.array([Trap()], dtype=object))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_bytes(b""),
    "cut in half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "one flipped bit": lambda path: flip(path, path.read_bytes().index(b"NUMPY")),  # others are names and dates of zip
    "objects inside": pickled,
    "another kind of file": lambda path: path.write_text("[]"),
    "an array outside an archive": lambda path: path.write_bytes(npy(np.arange(3))),
    "an array is missing": lambda path: np.savez(path, other=np.arange(3)),
    "an array of another type": lambda path: np.savez(path, offsets=np.array(["a"]), counts=np.array(["a"])),
}


def npy(array: np.ndarray) -> bytes:
    np.save(content := io.BytesIO(), array)
    return content.getvalue()


def test_every_flipped_bit_and_every_cut_is_noticed(tmp_path: Path) -> None:
    path, kinds = tmp_path / "a.npz", {"x": np.int64, "y": np.int32}
    arrays = {"x": np.arange(3), "y": np.arange(2, dtype=np.int32)}
    write_arrays(path, arrays)
    whole = path.read_bytes()
    damaged = [whole[:size] for size in range(len(whole))]
    damaged += [whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :] for place in range(len(whole))]
    for content in damaged:
        path.write_bytes(content)
        kept = read_arrays(path, kinds)
        assert kept is None or all(np.array_equal(kept[name], array) for name, array in arrays.items())


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_index_is_made_again(folder, open_data, damage: str, capsys) -> None:
    record = {"image": "images/0.png", "conversations": [{"from": "human", "value": "<image>\nWhat?"}]}
    record["conversations"].append({"from": "gpt", "value": "A picture."})
    path = folder / "data.json"
    path.write_text(json.dumps([{"id": f"r{number // 2}"} | record for number in range(4)]))
    first = open_data(path, on_error="skip")
    assert read_all(open_data(path, on_error="skip")) == read_all(first) and "note:" not in capsys.readouterr().err
    (kept,) = (folder / "run" / "cache").glob("*.npz")
    whole = kept.read_bytes()
    DAMAGES[damage](kept)
    again = open_data(path, on_error="skip")
    assert f"note: {kept} is damaged and is made again" in capsys.readouterr().err
    assert read_all(again) == read_all(first) and kept.read_bytes() == whole
    assert records.repeated_ids(again.selection.files[0]) == records.repeated_ids(first.selection.files[0])

    samples = StatesSamples(first, None)
    counts = samples.count_all(folder / "run" / "counts")
    (kept,) = (folder / "run").glob("*.npz")
    DAMAGES[damage](kept)
    assert np.array_equal(samples.count_all(folder / "run" / "counts"), counts)
    assert f"note: {kept} is damaged and is made again" in capsys.readouterr().err


def read_all(dataset) -> list:
    return [(dataset.sample_id(index), dataset[index].ids) for index in range(len(dataset))]
