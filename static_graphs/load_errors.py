"""Why a model cannot be served, in words for the person who named it.

ModelLoadError
└── UnsupportedModel     it loads, but the packed forward would not be the model's own; names the model and the reason
"""

from __future__ import annotations


class ModelLoadError(Exception):
    """The model cannot be loaded: not found, not readable, or not loadable as asked."""


class UnsupportedModel(ModelLoadError):
    """The architecture needs something that a packed step over cells does not give it."""
