from __future__ import annotations


class TokenizerFileError(ValueError):
    """The model's tokenizer is missing, broken, or of a kind that is not supported. One line, for the user."""
