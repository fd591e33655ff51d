"""Pictures with captions (LAION-COCO tars, folders, ImageNet, MS-COCO), and prompts of image generators."""
