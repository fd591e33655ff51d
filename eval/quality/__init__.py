"""Quality of generated images: FID, CLIP score, precision and recall, inception score, HPS v2.1, aesthetic score."""
