"""Checkpoints of other programs, read and written. See docs/convert.md."""

from overland.checkpoint.formats.formats import FORMATS, TARGETS, open_source
from overland.checkpoint.formats.options import Options
from overland.checkpoint.formats.source import Source

__all__ = ["FORMATS", "TARGETS", "Options", "Source", "open_source"]
