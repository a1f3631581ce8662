"""The one error of everything that reads a model from disk or the hub."""

from __future__ import annotations


class ModelError(Exception):
    """A model cannot be used. The message is one line that names the path (or id) and the reason; it is shown to the user as it is."""
