"""Converts a checkpoint from one format to another, tensor by tensor. See docs/convert.md."""

from overland.apps.convert.convert import Conversion, convert

__all__ = ["Conversion", "convert"]
