"""Fields that would change the answer and are not served yet: refused by name, never silently ignored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from router.api.errors import bad_request

_NO_EFFECT: Mapping[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "structured_outputs": ({},),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "grammar": (),
    "json_schema": (),
    "logits_processors": ([],),
    "use_beam_search": (False,),
    "prompt_logprobs": (),
    "prompt_embeds": (),
    "truncate_prompt_tokens": (),
    "documents": ([],),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "suffix": ("",),
    "reasoning_effort": ("none",),
}


def refuse_unsupported(body: Mapping[str, Any]) -> None:
    """Raises ApiError 400 for the first such field that is neither null nor without effect."""
    for name, harmless in _NO_EFFECT.items():
        value = body.get(name)
        if value is not None and value not in harmless:
            raise bad_request(name, f"{name} is not supported yet", "unsupported_parameter")
    best_of = body.get("best_of")
    if best_of is not None and best_of != (body.get("n") or 1):
        raise bad_request("best_of", "best_of is not supported yet (leave it out, or give it n's value)", "unsupported_parameter")
    for container, name in ((body, "chat_template"), (body.get("chat_template_kwargs"), "chat_template_kwargs.chat_template")):
        if isinstance(container, Mapping) and container.get("chat_template") is not None:
            raise bad_request(name, "chat templates come only from the server", "unsupported_parameter")
