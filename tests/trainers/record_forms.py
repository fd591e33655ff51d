"""The same records as LLaVA JSON with files beside it, as a table of `datasets`, as parquet, and as tars."""

import json
from pathlib import Path
from typing import Any

import datasets
from draftsmith.data.records.mixture import Name
from draftsmith.data.records.table_records import TableRecords
from draftsmith.data.records.tar_records import TarRecords
from small_records import write_tar


def files(record: dict, key: str) -> list[str]:
    named = record.get(key) or []
    return [named] if isinstance(named, str) else named


def table(records: list[dict], media: Path) -> datasets.Dataset:
    """Pictures and clips as bytes, null where a record has none."""
    rows = []
    for record in records:
        row: dict[str, Any] = {"id": record["id"], "conversations": record["conversations"]}
        for key in ("image", "video"):
            row[key] = [{"bytes": (media / name).read_bytes(), "path": name} for name in files(record, key)] or None
        rows.append(row)
    turn = {"from": datasets.Value("string"), "value": datasets.Value("string")}
    features = {"id": datasets.Value("string"), "conversations": [turn], "image": [datasets.Image(decode=False)]}
    features["video"] = [{"bytes": datasets.Value("binary"), "path": datasets.Value("string")}]
    return datasets.Dataset.from_list(rows, features=datasets.Features(features))


def members(record: dict, media: Path, key: str) -> list[tuple[str, bytes]]:
    """json, then the record's pictures and clips numbered in their order."""
    bare = {name: value for name, value in record.items() if name not in ("image", "video")}
    result = [(f"{key}.json", json.dumps(bare).encode())]
    for kind in ("image", "video"):
        for number, name in enumerate(files(record, kind)):
            result.append((f"{key}.{number}{Path(name).suffix}", (media / name).read_bytes()))
    return result


def write_forms(folder: Path, records: list[dict], media: Path) -> dict[str, Name]:
    """Form -> what a data section's `path` names; the tars are three."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "mine.json").write_text(json.dumps(records))
    rows = table(records, media)
    rows.save_to_disk(folder / "arrow")
    (folder / "parquet").mkdir()
    rows.to_parquet(folder / "parquet" / "train-00000-of-00001.parquet")
    third = -(-len(records) // 3)
    for shard in range(3):
        part = records[shard * third : (shard + 1) * third]
        write_tar(
            folder / f"shard-{shard:03d}.tar",
            [m for n, record in enumerate(part) for m in members(record, media, f"{shard:03d}-{n:05d}")],
        )
    return {
        "json": str(folder / "mine.json"),
        "arrow": TableRecords(kind="datasets", path=str(folder / "arrow")),
        "parquet": TableRecords(kind="datasets", path=str(folder / "parquet")),
        "tar": TarRecords(kind="webdataset", path=str(folder / "shard-{000..002}.tar")),
    }
