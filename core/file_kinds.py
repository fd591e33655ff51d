"""What a file is that was taken for text or JSON, by its first bytes: a better answer than where a parser stumbled."""

from __future__ import annotations

HEAD = 4096  # bytes to look at
MARK = b"\xef\xbb\xbf"  # a byte order mark of UTF-8, which is read

_AS_LINES = "write it as JSON lines"
_TO_UTF8 = "convert it: iconv -f {} -t UTF-8 FILE > new.jsonl"
# How files begin that people take for JSON -> what they are, and what to do. The first that fits counts.
_BEGINNINGS = {
    b"\xff\xfe\0\0": ("UTF-32 text", _TO_UTF8.format("UTF-32")),
    b"\0\0\xfe\xff": ("UTF-32 text", _TO_UTF8.format("UTF-32")),
    b"\xff\xfe": ("UTF-16 text", _TO_UTF8.format("UTF-16")),
    b"\xfe\xff": ("UTF-16 text", _TO_UTF8.format("UTF-16")),
    **dict.fromkeys((b"{\0", b"[\0"), ("UTF-16 text", _TO_UTF8.format("UTF-16LE"))),
    **dict.fromkeys((b"\0{", b"\0["), ("UTF-16 text", _TO_UTF8.format("UTF-16BE"))),
    b"\x1f\x8b": ("compressed with gzip", "unpack it first: gunzip"),
    b"\x28\xb5\x2f\xfd": ("compressed with zstd", "unpack it first: zstd -d"),
    b"\xfd7zXZ": ("compressed with xz", "unpack it first: xz -d"),
    b"\x04\x22\x4d\x18": ("compressed with lz4", "unpack it first: lz4 -d"),
    b"BZh": ("compressed with bzip2", "unpack it first: bzip2 -d"),
    b"PK\x03\x04": ("a zip archive", "unpack it first: unzip"),
    b"PAR1": ("a Parquet table", _AS_LINES),
    b"ARROW1": ("an Arrow table", _AS_LINES),
    b"SQLite format 3": ("an SQLite database", _AS_LINES),
    b"\x80\x04\x95": ("a Python pickle, which is not opened", _AS_LINES),
    b"\x89PNG": ("a picture", "name the file of records"),
    b"\xff\xd8\xff": ("a picture", "name the file of records"),
    b"version https://git-lfs": ("a pointer of Git LFS, not the file itself", "fetch the file: git lfs pull"),
    **dict.fromkeys((b"<!DOCTYPE", b"<!doctype", b"<html"), ("a web page, maybe an error of a download",
                                                          "download the file itself")),
}  # fmt: skip


def other_kind(head: bytes) -> tuple[str, str] | None:
    """What a file is and what to do about it; None where its beginning may be text in UTF-8.

    Args:
        head: its first `HEAD` bytes.
    """
    if head[257:262] == b"ustar":
        return "a tar archive", "tars are read with kind: webdataset"
    kind = next((kind for beginning, kind in _BEGINNINGS.items() if head.startswith(beginning)), None)
    if kind is None and b"\0" in head:
        return "binary data, or text with zero bytes in it (which a crash or a full disk leaves)", "fetch it again"
    return kind
