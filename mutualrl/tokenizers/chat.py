"""Chat templates: messages to text."""

from __future__ import annotations

from typing import Any

import jinja2

Message = dict[str, Any]
_PROBE = "\ue000system\ue001"  # private-use characters


def render(template: str, messages: list[Message], special: dict[str, str], generation_prompt: bool) -> str:
    """The text of a conversation, for templates with and without a system turn.

    A template that refuses a system turn, or drops it without a word, gets the system text at the head of the first
    user turn instead. Other errors of the template are raised (`jinja2.TemplateError`).
    """
    if messages and messages[0]["role"] == "system" and not messages[0]["content"].strip():
        messages = messages[1:]
    if not messages or messages[0]["role"] != "system":
        return _render(template, messages, special, generation_prompt)
    try:
        # Asked with a text that nothing else contains: the question may well repeat words of the system text.
        probe = [{**messages[0], "content": _PROBE}, *messages[1:]]
        if _PROBE in _render(template, probe, special, generation_prompt):
            return _render(template, messages, special, generation_prompt)
    except jinja2.TemplateError:
        pass
    return _render(template, fold_system(messages), special, generation_prompt)


def fold_system(messages: list[Message]) -> list[Message]:
    """The conversation with its leading system turn put at the head of the first user turn."""
    system, rest = messages[0]["content"], [dict(m) for m in messages[1:]]
    for message in rest:
        if message["role"] == "user":
            message["content"] = f"{system}\n\n{message['content']}"
            return rest
    return [{"role": "user", "content": system}, *rest]


def _render(template: str, messages: list[Message], special: dict[str, str], generation_prompt: bool) -> str:
    # transformers' own renderer: templates are written against its extensions and its sandbox.
    from transformers.utils.chat_template_utils import render_jinja_template

    texts, _ = render_jinja_template(
        conversations=[messages], chat_template=template, add_generation_prompt=generation_prompt, **special
    )
    return texts[0]
