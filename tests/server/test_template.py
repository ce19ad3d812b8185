"""Chat templates: what published ones use, and what a client may not do."""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
from pathlib import Path

import pytest

from freetoken.errors import RequestError, StartupError
from freetoken.server.generation import ChatPrompt
from freetoken.server.parsers import Tool
from freetoken.server.template import ChatTemplate
from server.fakes import CHATML, ByteTokenizer
from server.templates import LLAMA3, QWEN3, QWEN35

USER = [{"role": "user", "content": "hi <&> é"}]


def render(source: str, **fields: object) -> str:
    return ChatTemplate(source, "<s>", "</s>").render(ChatPrompt(**{"messages": USER, **fields}))


def test_special_tokens_and_blocks_are_trimmed() -> None:
    source = "{{ bos_token }}\n  {% for m in messages %}\n{{ m['content'] }}\n  {% endfor %}\n{{ eos_token }}"
    assert render(source) == "<s>\nhi <&> é\n</s>"


def test_functions_of_published_templates() -> None:
    assert render("{{ messages | tojson }}") == '[{"role": "user", "content": "hi <&> é"}]'
    assert render("{{ {'a': 1} | tojson(indent=2) }}") == '{\n  "a": 1\n}'
    assert render("{{ strftime_now('%Y') }}") == str(datetime.datetime.now().year)
    assert render("{% for m in [1, 2, 3] %}{% if m == 2 %}{% break %}{% endif %}{{ m }}{% endfor %}") == "1"
    assert render("a{% generation %}{{ 1 + 1 }}{% endgeneration %}b") == "a2b"
    assert render("{% set ns = namespace(x=1) %}{% set ns.x = 2 %}{{ ns.x }}") == "2"


def test_options_of_the_request_are_variables() -> None:
    source = "{% if enable_thinking is defined and not enable_thinking %}off{% else %}on{% endif %}"
    assert render(source) == "on"
    assert render(source, options={"enable_thinking": False}) == "off"
    for name in ("messages", "bos_token", "add_generation_prompt"):
        with pytest.raises(RequestError, match=name):
            render(source, options={name: 1})


def test_final_message_goes_on() -> None:
    talk = [*USER, {"role": "assistant", "content": "well, "}]
    fields = {"messages": talk, "add_generation_prompt": False, "continue_final_message": True}
    assert render(CHATML, **fields).endswith("<|im_start|>assistant\nwell, ")
    assert render(CHATML.replace("m.content", "m.content | trim"), **fields).endswith("assistant\nwell, ")
    with pytest.raises(RequestError, match="cannot be continued"):
        render("{{ messages[0].content }}", **fields)


def test_developer_is_system_unless_the_template_knows_better() -> None:
    messages = [{"role": "developer", "content": "x"}]
    assert render("{{ messages[0].role }}", messages=messages) == "system"
    assert render("{{ messages[0].role }}{# developer #}", messages=messages) == "developer"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.nothing.more }}",
        "{{ 1 / 0 }}",
        "{{ messages + 1 }}",
        "{{ messages[7].role }}",
        "{{ ''.__class__.__mro__ }}",
    ],
)
def test_what_goes_wrong_while_rendering_is_a_request_error(source: str) -> None:
    with pytest.raises(RequestError) as caught:
        render(source)
    assert caught.value.status == 400 and caught.value.param == "messages"


def test_messages_cannot_be_changed_by_the_template() -> None:
    with pytest.raises(RequestError):
        render("{{ messages.append(1) }}")


def test_a_message_is_data_not_template() -> None:
    assert render("{{ messages[0].content }}", messages=[{"role": "user", "content": "{{ 1 + 1 }}"}]) == "{{ 1 + 1 }}"


WEATHER = Tool("weather", "How it is.", {"type": "object", "properties": {"city": {"type": "string"}}})
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Bern", "days": 2}}}
TALK = [
    {"role": "user", "content": "How is it?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "sunny"},
]


def test_tools_calls_and_results() -> None:
    qwen3 = render(QWEN3, messages=TALK, tools=[WEATHER])
    assert '<tools>\n{"type": "function", "function": {"name": "weather", "description": "How it is.", "param' in qwen3
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern", "days": 2}}\n</tool_call>' in qwen3
    assert "<tool_response>\nsunny\n</tool_response>" in qwen3
    qwen35 = render(QWEN35, messages=TALK, tools=[WEATHER])
    assert "<function=weather>\n<parameter=city>\nBern\n</parameter>\n<parameter=days>\n2\n</parameter>" in qwen35
    assert qwen35.endswith("<|im_start|>assistant\n<think>\n")
    llama = render(LLAMA3, messages=TALK, tools=[WEATHER])
    assert '{"name": "weather", "parameters": {"city": "Bern", "days": 2}}<|eot_id|>' in llama
    twice = [{**TALK[1], "tool_calls": [CALL, CALL]}]
    with pytest.raises(RequestError, match="only supports one call at once"):
        render(LLAMA3, messages=twice)


def test_a_template_without_tools_is_told_of_them_in_words() -> None:
    text = render(CHATML, messages=[{"role": "system", "content": "Be brief."}, *TALK, TALK[2]], tools=[WEATHER])
    assert text.startswith("<|im_start|>system\nBe brief.\n\nYou can call functions.") and '"name": "weather"' in text
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern", "days": 2}}\n</tool_call>' in text
    assert "<|im_start|>user\n<tool_response>\nsunny\n</tool_response>\n<tool_response>\nsunny" in text
    assert render(CHATML, tools=[WEATHER]).startswith("<|im_start|>system\nYou can call functions.")
    assert "functions" not in render(CHATML, messages=TALK)


def test_text_parts_go_to_templates_that_read_them() -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert "user\nab<|im_end|>" in render(QWEN35, messages=parts)
    assert "user\na\nb<|im_end|>" in render(QWEN3, messages=parts)
    assert "user\na\nb<|im_end|>" in render(CHATML, messages=parts)
    assert "a\nb" in render(LLAMA3, messages=parts)
    go_on = {"add_generation_prompt": False, "continue_final_message": True}
    said = [*USER, {"role": "assistant", "content": parts[0]["content"]}]
    assert render(QWEN35, messages=said, **go_on).endswith("</think>\n\nab")


def test_effort_and_thinking_become_the_templates_switch() -> None:
    def tail(source: str, **fields: object) -> str:
        return render(source, **fields).rpartition("assistant\n")[2]

    closed = "<think>\n\n</think>\n\n"
    assert tail(QWEN3) == "" and tail(QWEN35) == "<think>\n"
    for source in (QWEN3, QWEN35):
        assert tail(source, effort="none") == tail(source, thinking=False) == closed
        assert tail(source, effort="high") == tail(source, thinking=True) == tail(source)
        # What the client sets itself goes first.
        assert tail(source, effort="none", options={"enable_thinking": True}) == tail(source)
    assert render("{{ reasoning_effort }}", effort="low") == "low"
    assert render("{{ thinking }}", effort="none") == "False"
    with pytest.raises(RequestError, match="no switch") as caught:
        render(CHATML, effort="low")
    assert caught.value.param == "reasoning_effort"
    assert render(CHATML, thinking=False) == render(CHATML)


def test_a_template_of_its_own_for_tools() -> None:
    template = ChatTemplate("plain", None, None, {"tool_use": "{{ tools | length }} tools", "rag": "{% if %}"})
    assert template.render(ChatPrompt(USER)) == "plain"
    assert template.render(ChatPrompt(USER, tools=[WEATHER])) == "1 tools"
    assert template.knows_tools and "tools" in template.sources
    assert not ChatTemplate(CHATML, None, None).knows_tools


def test_sources(tmp_path: Path) -> None:
    assert ChatTemplate.load(None, ByteTokenizer(None)) is None
    path = tmp_path / "chat.jinja"
    path.write_text("own {{ messages[0].content }}", encoding="utf-8")
    template = ChatTemplate.load(str(path), ByteTokenizer())
    assert template is not None and template.render(ChatPrompt(USER)) == "own hi <&> é"
    missing = str(tmp_path / "none")
    with pytest.raises(StartupError, match=r"cannot be read: No such file or directory$") as caught:
        ChatTemplate.load(missing, ByteTokenizer())
    assert str(caught.value).count(missing) == 1
    path.write_bytes(b"\xff")
    with pytest.raises(StartupError, match=r"cannot be read: it is not UTF-8$"):
        ChatTemplate.load(str(path), ByteTokenizer())
    with pytest.raises(StartupError, match="does not compile"):
        ChatTemplate("{% if %}", None, None)


@pytest.mark.parametrize("thinking", [True, False])
def test_same_text_as_the_reference_renderer(thinking: bool, tmp_path: Path) -> None:
    """transformers' own renderer, in another process because this one must stay without it."""
    source = (
        "{{ bos_token }}{%- for m in messages %}\n    {%- if loop.last and m.role == 'user' %}[{{ m.content | tojson }}]"
        "{%- else %}\n<{{ m.role }}>{{ m.content }}\n    {% endif %}\n{%- endfor %}"
        "{% if add_generation_prompt %}>{% if enable_thinking %}<think>{% endif %}{% endif %}"
    )
    messages = [{"role": "system", "content": "a\n b"}, {"role": "user", "content": "<'é\">"}]
    code = (
        "import sys, json\nfrom transformers.utils.chat_template_utils import render_jinja_template as r\n"
        "c = json.load(sys.stdin)\nprint(json.dumps(r([c['messages']], chat_template=c['source'],"
        " add_generation_prompt=True, bos_token='<s>', enable_thinking=c['thinking'])[0][0]))"
    )
    given = json.dumps({"messages": messages, "source": source, "thinking": thinking})
    done = subprocess.run([sys.executable, "-c", code], input=given, capture_output=True, text=True, check=True)
    assert render(source, messages=messages, options={"enable_thinking": thinking}) == json.loads(done.stdout)
