"""Declares two operators when torchvision is first imported: its CUDA build beside a CPU build of torch lacks them.

`scripts/test_engines` copies this file into vLLM's environment as sitecustomize.py.
"""

import importlib.abc
import sys

_kept: list = []  # operators last as long as their library does


class _Declare(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            library = torch.library.Library("torchvision", "DEF")
            for operator in ("nms", "qnms"):
                library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            _kept.append(library)
        return None


sys.meta_path.insert(0, _Declare())
