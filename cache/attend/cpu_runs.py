"""Attention on CPU."""

from cache.attend.reference import attend_cells

__all__ = ["attend_cells"]
