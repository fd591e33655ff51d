"""Pictures with captions (LAION-COCO tars, folders, ImageNet, MS-COCO) as one stream of numbered items.

An item that cannot be used keeps its number and says why, so that counts add up and a pass can go on anywhere. No more
than one picture is held at a time; nothing of a file is run or unpacked (see `tars.py`).
"""

from .coco import CocoSource
from .folders import ClassFolderSource, FolderSource
from .items import Captioned, Refused
from .pictures import center_crop, decode_image
from .stream import CaptionedSource, num_items, read
from .webdataset import TarSource

__all__ = [
    "Captioned",
    "CaptionedSource",
    "ClassFolderSource",
    "CocoSource",
    "FolderSource",
    "Refused",
    "TarSource",
    "center_crop",
    "decode_image",
    "num_items",
    "read",
]
