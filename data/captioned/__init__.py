"""Pictures with captions (LAION-COCO tars, folders, ImageNet, MS-COCO), and prompts of image generators."""

from .sources import ClassFolderSource as ClassFolderSource
from .sources import read as read

class_labels = ClassFolderSource.class_labels
