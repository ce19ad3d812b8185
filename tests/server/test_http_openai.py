from __future__ import annotations

from server.conftest import Served


def test_chat(server: Served) -> None:
    answer = server.openai.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "say:héllo 🙂"}])
    assert answer.choices[0].message.content == "héllo 🙂"
    assert answer.choices[0].finish_reason == "stop"
    print(answer)


def test_stream(server: Served) -> None:
    text = ""
    stream = server.openai.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "say:héllo 🙂"}],
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        print(chunk)
        text += chunk.choices[0].delta.content or "" if chunk.choices else ""
    assert text == "héllo 🙂"


def test_completion(server: Served) -> None:
    answer = server.openai.completions.create(model="tiny", prompt=["abc", "say:xyz"], echo=True, logprobs=1)
    print(answer)
