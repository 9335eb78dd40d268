"""Checkpoints of other programs, in and out: `overland convert`. See docs/convert.md."""

from overland.checkpoint.convert.convert import Summary, convert
from overland.checkpoint.convert.formats import FORMATS, TARGETS, open_source
from overland.checkpoint.convert.options import Options
from overland.checkpoint.convert.source import Source

__all__ = ["FORMATS", "TARGETS", "Options", "Source", "Summary", "convert", "open_source"]
