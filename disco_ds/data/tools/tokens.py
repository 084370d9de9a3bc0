"""How many tokens a caption has before it is cut to the model's context."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

LONG = 8192
"""A context that no caption fills: what is counted is then not cut."""


class TokenCounter:
    """Tokens of a text, with those that mark its start and end; picklable when the tokenizer is.

    Args:
        tokenizer: one of open_clip's; what it gives is padded at the end with one token id.
        context: tokens that the model takes.
    """

    def __init__(self, tokenizer: Callable[..., Tensor], context: int) -> None:
        self.tokenizer, self.context = tokenizer, context

    def __call__(self, text: str) -> int:
        encode: Any = getattr(self.tokenizer, "encode", None)
        if encode is not None and hasattr(self.tokenizer, "sot_token_id"):
            return len(encode(text)) + 2
        row = self.tokenizer([text], context_length=LONG)[0]
        # The padding's id is that of the last place; a text that ends in it has a token of its own before.
        kept = (row != row[-1]).nonzero()
        return int(kept[-1]) + 1 if len(kept) else 0
