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
from freetoken.server.template import ChatTemplate
from server.fakes import CHATML, ByteTokenizer

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


def test_sources(tmp_path: Path) -> None:
    assert ChatTemplate.load(None, ByteTokenizer(None)) is None
    path = tmp_path / "chat.jinja"
    path.write_text("own {{ messages[0].content }}", encoding="utf-8")
    template = ChatTemplate.load(str(path), ByteTokenizer())
    assert template is not None and template.render(ChatPrompt(USER)) == "own hi <&> é"
    with pytest.raises(StartupError, match="cannot be read"):
        ChatTemplate.load(str(tmp_path / "none"), ByteTokenizer())
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
