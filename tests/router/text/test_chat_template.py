from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.text import chat_template
from router.text.chat_template import ChatTemplate, Conversation, TemplateError
from tests.router.smollm2 import smollm2
from tests.router.text import smollm2_vectors as vectors

tokenizer = smollm2().tokenizer
served = smollm2().template
assert served is not None
template: ChatTemplate = served
SPECIALS = ["<|im_end|>", "<|im_start|>", "<|endoftext|>", "<|im_", "end|>", "<", ">", "|>", "<|im_start", "\n", " ", "system", "a"]


def ids_of(messages: list[dict[str, Any]], which: ChatTemplate = template, **options: Any) -> list[int]:
    rendered = which.render(Conversation(messages, **options), tokenizer)
    return list(tokenizer.encode_guarded(rendered.text, rendered.guard))


def user(content: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


@pytest.mark.parametrize(("messages", "ids"), vectors.CHATS)
def test_prompt_ids_are_the_models(messages: list[dict[str, Any]], ids: list[int]) -> None:
    assert ids_of(messages) == ids


def test_golden_prompts() -> None:
    path = Path(__file__).parents[4] / "shared" / "golden" / "smollm2.json"
    if not path.exists():
        pytest.skip("the recorded reference outputs (golden/) are not beside this checkout")
    for item in json.loads(path.read_text())["items"]:
        if item["kind"] == "chat":
            assert ids_of(item["messages"]) == item["prompt_ids"]


def test_content_never_becomes_special_tokens() -> None:
    ids = ids_of(user(vectors.INJECTION))
    assert ids == [*vectors.SYSTEM_IDS, 1, 4093, 198, *vectors.INJECTION_PLAIN, 2, 198, 1, 520, 9531, 198]


def test_without_the_guard_it_would(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template._Guard, "__call__", lambda self, text: text)
    assert ids_of(user(vectors.INJECTION)) == [*vectors.SYSTEM_IDS, 1, 4093, 198, *vectors.INJECTION_SPECIAL, 2, 198, 1, 520, 9531, 198]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.lists(st.sampled_from(SPECIALS), max_size=6).map("".join), min_size=1, max_size=3))
def test_no_content_brings_a_special_token(contents: list[str]) -> None:
    """As many special tokens as harmless contents would have; and the text is the one that was sent."""
    messages = [{"role": "user", "content": content} for content in contents]
    harmless = [{"role": "user", "content": "x"} for _ in contents]
    count = sum(i in vectors.SPECIAL_IDS for i in ids_of(messages))
    assert count == sum(i in vectors.SPECIAL_IDS for i in ids_of(harmless))
    text = tokenizer.decode(ids_of(messages), skip_special=False)
    assert all(content in text for content in contents)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=60))
def test_harmless_content_has_the_ids_of_the_plain_text(content: str) -> None:
    rendered = template.render(Conversation(user(content)), tokenizer)
    if not any(special in content for special in ("<|", "|>")):
        plain = rendered.text.replace(rendered.guard, "")
        assert list(tokenizer.encode_guarded(rendered.text, rendered.guard)) == list(tokenizer.encode(plain, parse_special=True))


def test_guards_survive_templates_that_trim_and_split() -> None:
    trimming = ChatTemplate("{% for m in messages %}<|im_start|>{{ m.content.split('</t>')[-1] | trim }}<|im_end|>{% endfor %}")
    ids = ids_of(user("skipped</t>  hi <|im_end|>  "), trimming)
    assert ids == [1, *tokenizer.encode("hi <|im_end|>", parse_special=False), 2]


def test_a_special_token_cannot_be_completed_by_the_template() -> None:
    joining = ChatTemplate("{% for m in messages %}{{ m.content }}im_end|>{% endfor %}")
    assert 2 not in ids_of(user("<|"), joining)
    closing = ChatTemplate("<|im_{{ messages[0].content }}")
    assert 2 not in ids_of(user("end|>"), closing)


def test_names_and_variables_are_guarded_too() -> None:
    naming = ChatTemplate("{{ messages[0].name }}{{ note }}{{ messages[0].tool_calls | tojson }}<|im_end|>")
    message = {"role": "user", "name": "<|im_end|>", "content": "", "tool_calls": [{"<|im_start|>": "<|im_end|>"}]}
    ids = ids_of([message], naming, variables={"note": "<|im_start|>"})
    assert [i for i in ids if i in vectors.SPECIAL_IDS] == [2]


def test_continuing_the_final_message() -> None:
    messages = [*user("Hi"), {"role": "assistant", "content": "Hello <|im_end|> th"}]
    ids = ids_of(messages, add_generation_prompt=False, continue_final_message=True)
    opened = ids_of(user("Hi"))
    assert ids == [*opened, *tokenizer.encode("Hello <|im_end|> th", parse_special=False)]
    dropping = ChatTemplate("{{ messages[0].content }}")
    with pytest.raises(TemplateError, match="cannot be continued"):
        dropping.render(Conversation(messages, continue_final_message=True), tokenizer)


def test_bounds_on_size_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}xxxxxxxx{% endfor %}{% endfor %}"
    monkeypatch.setattr(chat_template, "OUTPUT_BYTES_MAX", 4096)
    with pytest.raises(TemplateError, match="exceeds 4096 bytes"):
        ChatTemplate(endless).render(Conversation(user("x")), tokenizer)
    monkeypatch.setattr(chat_template, "OUTPUT_BYTES_MAX", 10**12)
    ticks = iter(range(10**9))
    with pytest.raises(TemplateError, match="longer than 1 s"):
        ChatTemplate(endless, clock=lambda: next(ticks) / 1000).render(Conversation(user("x")), tokenizer)


def test_the_sandbox_holds() -> None:
    for source in ("{{ messages.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ cycler.__init__.__globals__ }}"):
        with pytest.raises(TemplateError):
            ChatTemplate(source).render(Conversation(user("x")), tokenizer)


def test_a_template_may_refuse() -> None:
    refusing = ChatTemplate("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(TemplateError, match="roles must alternate"):
        refusing.render(Conversation(user("x")), tokenizer)
    with pytest.raises(TemplateError, match="does not compile"):
        ChatTemplate("{% for %}")
