"""Declares two operators when torchvision is first imported: its CUDA build beside a CPU build of torch lacks them."""

import importlib.abc
import sys


class _Declare(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            self.library = torch.library.Library("torchvision", "DEF")
            for operator in ("nms", "qnms"):
                self.library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            sys.modules.setdefault("_torchvision_operators", self)
        return None


sys.meta_path.insert(0, _Declare())
