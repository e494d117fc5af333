"""The image set as metrics read it: `ImageSet.load(folder)`, `.entries`, `.path(entry)`, and what pairs two of them."""

from __future__ import annotations

from halfbyte.records.image_set import ImageEntry, ImageSet, ImageSettings, require_paired

__all__ = ["ImageEntry", "ImageSet", "ImageSettings", "require_paired"]
