"""The body of /v1/chat/completions. Messages are checked by hand: exact names in errors, and only the first few of them."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from router.api.errors import ApiError, bad_request
from router.api.limits import CONTENT_PARTS_MAX, ERRORS_SHOWN_MAX, MAX_TOKENS_MAX, MESSAGES_MAX, TOP_LOGPROBS_MAX
from router.api.sampling_body import SamplingBody
from router.api.within import within
from router.text.chat_template import RESERVED_VARIABLES

Message = dict[str, Any]

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool", "function": "tool"}
_OPTIONAL_STRINGS = ("name", "tool_call_id", "reasoning_content")


def template_variables(value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError("must be an object")
    if not RESERVED_VARIABLES.isdisjoint(value):
        raise ValueError("sets a variable that is the server's")
    return value


class ChatBody(SamplingBody):
    messages: Any  # see read_messages
    max_tokens: Annotated[int | None, within(1, MAX_TOKENS_MAX)] = None
    max_completion_tokens: Annotated[int | None, within(1, MAX_TOKENS_MAX)] = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, within(0, TOP_LOGPROBS_MAX)] = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Annotated[Any, BeforeValidator(template_variables)] = Field(default_factory=dict)


def read_messages(value: Any) -> list[Message]:
    """Messages as a template wants them: known roles, contents as strings. Raises ApiError 400 with the index of the first bad ones."""
    if not isinstance(value, list):
        raise bad_request("messages", "messages must be a list of objects")
    if not value:
        raise bad_request("messages", "messages must not be empty")
    if len(value) > MESSAGES_MAX:
        raise bad_request("messages", f"at most {MESSAGES_MAX} messages")
    messages: list[Message] = []
    faults: list[tuple[str, str]] = []
    for index, item in enumerate(value):
        try:
            messages.append(_message(item))
        except _Fault as fault:
            faults.append((f"messages[{index}]{fault.field}", fault.message))
            if len(faults) == ERRORS_SHOWN_MAX:
                break
    if faults:
        raise ApiError(400, "; ".join(f"{param}: {message}" for param, message in faults), faults[0][0])
    return messages


class _Fault(Exception):
    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field
        self.message = message


def _message(item: Any) -> Message:
    if not isinstance(item, dict):
        raise _Fault("", "must be an object")
    role = item.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise _Fault(".role", "must be system, developer, user, assistant or tool")
    message: Message = {"role": _ROLES[role]}
    calls = item.get("tool_calls")
    if calls:
        if role != "assistant" or not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
            raise _Fault(".tool_calls", "must be a list of objects, of an assistant's message")
        message["tool_calls"] = calls
    content = item.get("content")
    message["content"] = "" if content is None and role == "assistant" and calls else _content(content)
    for name in _OPTIONAL_STRINGS:
        if item.get(name) is not None:
            if not isinstance(item[name], str):
                raise _Fault(f".{name}", "must be a string")
            message[name] = item[name]
    return message


def _content(content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _Fault(".content", "must be a string or a list of text parts")
    if len(content) > CONTENT_PARTS_MAX:
        raise _Fault(".content", f"at most {CONTENT_PARTS_MAX} parts")
    texts: list[str] = []
    for index, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise _Fault(f".content[{index}]", "must be a text part: this model reads text only")
        texts.append(part["text"])
    return "".join(texts)
