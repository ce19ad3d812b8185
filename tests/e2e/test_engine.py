"""``Engine``: the offline API on a tiny checkpoint."""

from __future__ import annotations

import gc
import itertools
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from make_tiny_model import make_tiny_model
from oracle import Generated, Oracle

from freetoken import Engine, SamplingParams
from freetoken.errors import FreetokenError, RequestError, StartupError
from freetoken.messages import TokenLogprob

GREEDY = {"temperature": 0, "ignore_eos": True}
PROMPTS = ["The quick brown fox", "def add(left, right):", "Où est", "It is 384,400 km away"]


def short(count: int = 8, **values: Any) -> dict[str, Any]:
    return {**GREEDY, "max_new_tokens": count, **values}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama whose embedding has three rows that its tokenizer does not know (do not modify it)."""
    return make_tiny_model(tmp_path_factory.mktemp("engine") / "tiny", extra_vocab=3, seed=21)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    with Engine(folder, device="cpu", page_size=4, max_total_tokens=512, context_length=600, random_seed=1) as engine:
        yield engine


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """After every test the engine is idle: no request is live, and its books add up."""
    yield
    if "engine" in request.fixturenames:
        shared = request.getfixturevalue("engine")
        assert not shared._live
        while shared._scheduler.has_work:
            shared._scheduler.step()
        shared._scheduler.check()


def refused(call: Callable[[], Any]) -> RequestError:
    with pytest.raises(RequestError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return caught.value


# --- prompts and answers ---------------------------------------------------------------------------------------------


def test_one_prompt_is_one_answer(engine: Engine) -> None:
    answer = engine.generate(PROMPTS[0], short())
    assert isinstance(answer, dict) and set(answer) == {"text", "output_ids", "meta_info"}
    meta = answer["meta_info"]
    assert set(meta) == {"id", "prompt_tokens", "completion_tokens", "cached_tokens", "finish_reason"}
    assert meta["prompt_tokens"] == len(engine.tokenizer.encode(PROMPTS[0]))
    assert meta["completion_tokens"] == len(answer["output_ids"]) == 8
    assert meta["finish_reason"] == {"type": "length", "length": 8}
    assert answer["text"] == engine.tokenizer.decode(answer["output_ids"])


def test_a_list_is_a_list_in_order(engine: Engine) -> None:
    answers = engine.generate(PROMPTS, short())
    assert [a["output_ids"] for a in answers] == [engine.generate(p, short())["output_ids"] for p in PROMPTS]
    assert len({a["meta_info"]["id"] for a in answers}) == len(PROMPTS)
    assert [type(engine.generate(p, short(1))) for p in ([PROMPTS[0]], (PROMPTS[0],), [])] == [list, list, list]


def test_token_ids(engine: Engine) -> None:
    ids = [engine.tokenizer.encode(prompt) for prompt in PROMPTS]
    expected = [answer["output_ids"] for answer in engine.generate(PROMPTS, short())]
    assert [answer["output_ids"] for answer in engine.generate(input_ids=ids, sampling_params=short())] == expected
    single = engine.generate(input_ids=ids[0], sampling_params=short())
    assert isinstance(single, dict) and single["output_ids"] == expected[0]
    unknown = engine.config.model.vocab_size - 1
    assert unknown >= engine.config.sample_vocab
    assert engine.generate(input_ids=[unknown], sampling_params=short())["meta_info"]["prompt_tokens"] == 1


def test_one_dictionary_of_parameters_for_each(engine: Engine) -> None:
    counts = [1, 5, 3, 9]
    answers = engine.generate(PROMPTS, [short(count) for count in counts])
    assert [len(answer["output_ids"]) for answer in answers] == counts


def test_more_prompts_than_a_server_would_queue(folder: Path) -> None:
    with Engine(folder, device="cpu", max_total_tokens=4096) as engine:
        answers = engine.generate(["a"] * 1100, short(1))
    assert len(answers) == 1100


def test_a_bounded_queue_refuses_when_asked_for(folder: Path) -> None:
    with Engine(folder, device="cpu", max_total_tokens=512, max_running_requests=1, max_queued_requests=1) as engine:
        error = refused(lambda: engine.generate(["a"] * 3, short(1)))
        assert (error.status, error.code) == (503, "queue_full")
        assert len(engine.generate(["a"] * 2, short(1))) == 2


def test_n_gives_a_list_of_different_draws(engine: Engine) -> None:
    wish = short(12, temperature=1.0, n=3, seed=5)
    drawn, again = engine.generate(PROMPTS[0], wish), engine.generate(PROMPTS[0], wish)
    assert isinstance(drawn, list) and len({answer["text"] for answer in drawn}) == 3
    assert [answer["output_ids"] for answer in again] == [answer["output_ids"] for answer in drawn]
    both = engine.generate(PROMPTS[:2], [short(4, n=2), short(4)])
    assert len(both) == 3 and both[0]["output_ids"] == both[1]["output_ids"] != both[2]["output_ids"]


def test_cached_tokens_of_a_second_call(folder: Path) -> None:
    with Engine(folder, device="cpu", page_size=4, max_total_tokens=512) as engine:
        ids = list(range(3, 45))
        first, second = (engine.generate(input_ids=ids, sampling_params=short()) for _ in range(2))
        assert first["meta_info"]["cached_tokens"] == 0
        assert second["meta_info"]["cached_tokens"] == 40
        assert first["output_ids"] == second["output_ids"]


# --- streams ---------------------------------------------------------------------------------------------------------


def test_stream_of_one(engine: Engine) -> None:
    whole = engine.generate(PROMPTS[2], short(20))
    events = list(engine.generate(PROMPTS[2], short(20), stream=True))
    assert len(events) == 20
    for earlier, later in itertools.pairwise(events):
        assert later["text"].startswith(earlier["text"])
        assert later["output_ids"][:-1] == earlier["output_ids"]
        assert earlier["meta_info"]["finish_reason"] is None and "index" not in earlier
    assert (events[-1]["text"], events[-1]["output_ids"]) == (whole["text"], whole["output_ids"])
    assert events[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 20}


def test_stream_of_many(engine: Engine) -> None:
    wishes = [short(3), short(9), short(1), short(6)]
    expected = engine.generate(PROMPTS, wishes)
    last: dict[int, dict[str, Any]] = {}
    order = []
    for event in engine.generate(PROMPTS, wishes, stream=True):
        assert event["index"] not in last or last[event["index"]]["meta_info"]["finish_reason"] is None
        last[event["index"]] = event
        order.append(event["index"])
    assert [last[i]["output_ids"] for i in range(4)] == [answer["output_ids"] for answer in expected]
    assert all(last[i]["meta_info"]["finish_reason"] for i in range(4))
    assert order[:4] == [0, 1, 2, 3]


def test_a_stream_left_early_ends_its_requests(engine: Engine) -> None:
    stream = engine.generate(PROMPTS, short(200), stream=True)
    next(stream)
    assert len(engine._live) == 4
    stream.close()
    assert not engine._live


def test_a_stream_never_read_ends_its_requests(engine: Engine) -> None:
    stream = engine.generate(PROMPTS, short(200), stream=True)
    assert len(engine._live) == 4
    del stream
    gc.collect()
    assert not engine._live


def test_a_call_while_a_stream_is_open(engine: Engine) -> None:
    expected = engine.generate(PROMPTS[0], short(30))["output_ids"]
    stream = engine.generate(PROMPTS[0], short(30), stream=True)
    next(stream)
    assert engine.generate(PROMPTS[1], short(40))["meta_info"]["completion_tokens"] == 40
    assert list(stream)[-1]["output_ids"] == expected


# --- where it ends ---------------------------------------------------------------------------------------------------


def stretch(text: str, start: int, length: int) -> str:
    """Part of ``text`` from ``start`` on without replacement characters, to be used as a stop string."""
    for at in range(start, len(text) - length):
        part = text[at : at + length]
        if "\ufffd" not in part and text.find(part) == at:
            return part
    raise AssertionError("the tiny model wrote no readable stretch")


@pytest.mark.parametrize("length", [1, 3])
def test_stop_strings_are_trimmed(length: int, engine: Engine) -> None:
    full = engine.generate(PROMPTS[0], short(60))
    stop = stretch(full["text"], 20, length)
    answer = engine.generate(PROMPTS[0], short(60, stop=["never this", stop]))
    assert answer["text"] == full["text"][: full["text"].index(stop)]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    count = len(answer["output_ids"])
    assert answer["output_ids"] == full["output_ids"][:count] and count < 60
    kept = engine.generate(PROMPTS[0], short(60, stop=stop, no_stop_trim=True))
    assert kept["text"] == answer["text"] + stop
    events = list(engine.generate(PROMPTS[0], short(60, stop=stop), stream=True))
    assert events[-1]["text"] == answer["text"]
    assert all(answer["text"].startswith(event["text"]) for event in events)


def test_a_stop_string_completed_by_the_last_token(engine: Engine) -> None:
    """The length limit and the stop string fall together: the stop is what is reported."""
    full = engine.generate(PROMPTS[0], short(60))
    stop = stretch(full["text"], 20, 3)
    count = len(engine.generate(PROMPTS[0], short(60, stop=stop))["output_ids"])
    answer = engine.generate(PROMPTS[0], short(count, stop=stop))
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert answer["text"] == full["text"][: full["text"].index(stop)]


def first_new(ids: list[int], start: int) -> int:
    return next(i for i in range(start, len(ids)) if ids[i] not in ids[:i])


def test_stop_token_ids(engine: Engine) -> None:
    full = engine.generate(PROMPTS[1], short(40))["output_ids"]
    at = first_new(full, 5)
    answer = engine.generate(PROMPTS[1], short(40, stop_token_ids=[full[at]]))
    assert answer["output_ids"] == full[: at + 1]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": full[at]}
    assert answer["meta_info"]["completion_tokens"] == at + 1
    assert answer["text"] == engine.tokenizer.decode(full[:at])
    kept = engine.generate(PROMPTS[1], short(40, stop_token_ids=[full[at]], no_stop_trim=True))
    assert kept["text"] == engine.tokenizer.decode(full[: at + 1])


def test_end_of_sequence_and_ignoring_it(engine: Engine) -> None:
    eos = engine.config.model.eos_token_ids[0]
    force = {"logit_bias": {eos: 100}}
    answer = engine.generate(PROMPTS[0], {"temperature": 0, "max_new_tokens": 5, **force})
    assert answer["output_ids"] == [eos] and answer["text"] == ""
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": eos}
    assert engine.generate(PROMPTS[0], short(5, **force))["output_ids"] == [eos] * 5


def test_min_new_tokens(engine: Engine) -> None:
    eos = engine.config.model.eos_token_ids[0]
    wish = {"temperature": 0, "max_new_tokens": 9, "min_new_tokens": 4, "logit_bias": {eos: 100}}
    answer = engine.generate(PROMPTS[0], wish)
    assert len(answer["output_ids"]) == 5 and answer["output_ids"][-1] == eos and eos not in answer["output_ids"][:4]


def test_logit_bias(engine: Engine) -> None:
    (first,) = engine.generate(PROMPTS[0], short(1))["output_ids"]
    assert engine.generate(PROMPTS[0], short(3, logit_bias={"17": 100}))["output_ids"] == [17] * 3
    assert first not in engine.generate(PROMPTS[0], short(3, logit_bias={first: -100}))["output_ids"]


def test_without_a_limit_it_runs_to_the_end_of_context_or_pool(engine: Engine, folder: Path) -> None:
    answer = engine.generate(PROMPTS[0], GREEDY)
    assert answer["meta_info"]["prompt_tokens"] + answer["meta_info"]["completion_tokens"] == 512
    with Engine(folder, device="cpu", context_length=64) as other:
        meta = other.generate(PROMPTS[0], GREEDY)["meta_info"]
    assert meta["prompt_tokens"] + meta["completion_tokens"] == 64
    assert meta["finish_reason"]["type"] == "length"


# --- log-probabilities -----------------------------------------------------------------------------------------------


def test_logprobs_are_those_of_transformers(engine: Engine, folder: Path) -> None:
    wish = short(12, return_logprob=True, top_logprobs_num=4, prompt_logprobs=2)
    answers = engine.generate(PROMPTS, wish)
    items = []
    for prompt, answer in zip(PROMPTS, answers):
        meta = answer["meta_info"]
        assert all(text == engine.tokenizer.token_text(t) for _, t, text in meta["output_token_logprobs"])
        read = {}
        for side in ("output", "input"):
            pairs = zip(meta[f"{side}_token_logprobs"], meta[f"{side}_top_logprobs"])
            read[side] = [
                TokenLogprob(token, value, [t for _, t, _ in top], [v for v, _, _ in top])
                for (value, token, _), top in pairs
            ]
        assert [len(entry.top_ids) for entry in read["output"]] == [4] * 12
        items.append(Generated(engine.tokenizer.encode(prompt), answer["output_ids"], read["output"], read["input"]))
    assert Oracle(folder, engine.config.sample_vocab).check(items) <= 1


def test_logprobs_asked_for_in_the_call(engine: Engine) -> None:
    """As in SGLang: beside the sampling parameters, which win where they say something themselves."""
    both = [engine.generate("a", short(3, return_logprob=True, top_logprobs_num=2))["meta_info"]]
    both += [engine.generate("a", short(3), return_logprob=True, top_logprobs_num=2)["meta_info"]]
    for name in ("output_token_logprobs", "output_top_logprobs"):
        assert both[0][name] == both[1][name] and len(both[0][name]) == 3
    given = [short(3), short(3, return_logprob=False), SamplingParams(max_new_tokens=3)]
    given.append(SamplingParams(max_new_tokens=3, logprobs=1))
    metas = [answer["meta_info"] for answer in engine.generate(["a"] * 4, given, return_logprob=True)]
    assert ["output_token_logprobs" in meta for meta in metas] == [True, False, True, True]
    assert [len(top) for top in metas[3]["output_top_logprobs"]] == [1, 1, 1]
    assert metas[2]["output_top_logprobs"] == [[], [], []]


def test_sampling_params_may_be_the_class(engine: Engine) -> None:
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_new_tokens=8)
    expected = [engine.generate(prompt, short())["output_ids"] for prompt in PROMPTS]
    assert engine.generate(PROMPTS[0], params)["output_ids"] == expected[0]
    assert "output_token_logprobs" not in engine.generate(PROMPTS[0], params)["meta_info"]
    assert [answer["output_ids"] for answer in engine.generate(PROMPTS, params)] == expected
    mixed = [params, short(), params, short()]
    assert [answer["output_ids"] for answer in engine.generate(PROMPTS, mixed)] == expected
    assert [len(answer["output_ids"]) for answer in engine.generate("a", SamplingParams(n=2, max_new_tokens=2))] == [
        2,
        2,
    ]


def test_logprobs_only_for_who_asked(engine: Engine) -> None:
    wishes = [short(3), short(3, return_logprob=True), short(3, return_logprob=False), short(3, logprobs=2)]
    metas = [answer["meta_info"] for answer in engine.generate(PROMPTS, wishes)]
    assert ["output_token_logprobs" in meta for meta in metas] == [False, True, False, True]
    assert metas[1]["output_top_logprobs"] == [[], [], []]
    assert [len(top) for top in metas[3]["output_top_logprobs"]] == [2, 2, 2]


# --- refusals --------------------------------------------------------------------------------------------------------

BAD_CALLS: list[tuple[dict[str, Any], str]] = [
    ({}, "prompt"),
    ({"prompt": "a", "input_ids": [1]}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": ["a", 5]}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": ["a", ""]}, "prompt"),
    ({"prompt": "half \ud800"}, "prompt"),
    ({"input_ids": 5}, "input_ids"),
    ({"input_ids": "abc"}, "input_ids"),
    ({"input_ids": ["abc"]}, "input_ids"),
    ({"input_ids": []}, "input_ids"),
    ({"input_ids": [[1], []]}, "input_ids"),
    ({"input_ids": [[1], 2]}, "input_ids"),
    ({"input_ids": [1, True]}, "input_ids"),
    ({"input_ids": [1.5]}, "input_ids"),
    ({"input_ids": [-1]}, "input_ids"),
    ({"input_ids": [387]}, "input_ids"),
    ({"prompt": "a", "sampling_params": 5}, "sampling_params"),
    ({"prompt": "a", "sampling_params": [5]}, "sampling_params"),
    ({"prompt": ["a", "b"], "sampling_params": [{}]}, "sampling_params"),
    ({"prompt": "a", "sampling_params": {"temprature": 1}}, "temprature"),
    ({"prompt": "a", "sampling_params": {"temperature": -1}}, "temperature"),
    ({"prompt": "a", "sampling_params": {"temperature": float("nan")}}, "temperature"),
    ({"prompt": "a", "sampling_params": {"max_new_tokens": 0}}, "max_new_tokens"),
    ({"prompt": "a", "sampling_params": {"max_new_tokens": 2, "min_new_tokens": 3}}, "min_new_tokens"),
    ({"prompt": "a", "sampling_params": {"top_p": 0}}, "top_p"),
    ({"prompt": "a", "sampling_params": {"stop": [1]}}, "stop"),
    ({"prompt": "a", "sampling_params": {"stop": ["x"] * 17}}, "stop"),
    ({"prompt": "a", "sampling_params": {"n": 0}}, "n"),
    ({"prompt": "a", "sampling_params": {"return_logprob": "yes"}}, "return_logprob"),
    ({"prompt": "a", "return_logprob": "yes"}, "return_logprob"),
    ({"prompt": "a", "return_logprob": [True]}, "return_logprob"),
    ({"prompt": "a", "top_logprobs_num": 21}, "top_logprobs_num"),
    ({"prompt": "a", "sampling_params": SamplingParams(), "top_logprobs_num": -1}, "top_logprobs_num"),
    ({"prompt": "a", "sampling_params": {"stop_token_ids": [387]}}, "stop_token_ids"),
    ({"prompt": "a", "sampling_params": SamplingParams(stop_token_ids=(387,))}, "stop_token_ids"),
    ({"prompt": ["a", "b"], "sampling_params": [SamplingParams()]}, "sampling_params"),
    ({"prompt": "a", "sampling_params": {"logit_bias": {"387": 1}}}, "logit_bias"),
    ({"prompt": ["a", "b"], "sampling_params": [{}, {"logit_bias": {"387": 1}}]}, "logit_bias"),
]


@pytest.mark.parametrize(("call", "field"), BAD_CALLS, ids=lambda value: str(value)[:60])
@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_call_names_its_field(call: dict[str, Any], field: str, stream: bool, engine: Engine) -> None:
    def attempt() -> None:
        made = engine.generate(**call, stream=stream)
        if stream:
            list(made)

    error = refused(attempt)
    assert (error.param, error.status) == (field, 400)
    assert not engine._live


def test_a_prompt_too_long_names_the_limit_and_the_flag(engine: Engine, folder: Path) -> None:
    pool = refused(lambda: engine.generate(input_ids=[3] * 512, sampling_params=short()))
    assert pool.code == "kv_cache_exceeded" and "512" in str(pool) and "--max-total-tokens" in str(pool)
    context = refused(lambda: engine.generate(input_ids=[[3], [3] * 600], sampling_params=short()))
    assert context.code == "context_length_exceeded" and "600" in str(context) and "--context-length" in str(context)
    assert engine.generate(input_ids=[3] * 511, sampling_params=short())["meta_info"]["completion_tokens"] == 1


# --- life ------------------------------------------------------------------------------------------------------------


def test_shutdown_twice_and_use_after(folder: Path) -> None:
    engine = Engine(str(folder), device="cpu", max_total_tokens=256)
    stream = engine.generate("a", short(50), stream=True)
    next(stream)
    engine.shutdown()
    engine.shutdown()
    for call in (lambda: engine.generate("a"), lambda: engine.generate("a", stream=True), lambda: list(stream)):
        with pytest.raises(FreetokenError, match="shut down"):
            call()
    with engine:
        pass


def test_two_engines_in_one_process(engine: Engine, tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "other", arch="qwen3", seed=22)
    expected = engine.generate(PROMPTS, short())
    with Engine(path, device="cpu", max_total_tokens=512) as other:
        mine, theirs = (e.generate(PROMPTS[0], short(20), stream=True) for e in (engine, other))
        pairs = list(zip(mine, theirs))
        assert len(pairs) == 20 and pairs[-1][0]["output_ids"] != pairs[-1][1]["output_ids"]
    again = engine.generate(PROMPTS, short())
    assert [a["output_ids"] for a in again] == [a["output_ids"] for a in expected]


def test_threads_share_the_engine(engine: Engine) -> None:
    """Eight threads, some streaming, each get their own text."""
    prompts = [f"{PROMPTS[i % 4]} {i}" for i in range(8)]
    expected = [engine.generate(prompt, short(25))["output_ids"] for prompt in prompts]
    got: dict[int, list[list[int]]] = {}
    start = threading.Barrier(8)

    def work(index: int) -> None:
        start.wait()
        answers = []
        for round_ in range(3):
            made = engine.generate(prompts[index], short(25), stream=(index + round_) % 2 == 0)
            answers.append(made["output_ids"] if isinstance(made, dict) else list(made)[-1]["output_ids"])
        got[index] = answers

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert got == {index: [expected[index]] * 3 for index in range(8)}


# --- starts that cannot work -----------------------------------------------------------------------------------------


def start_refused(path: Path | str, **arguments: Any) -> str:
    with pytest.raises(StartupError) as caught:
        Engine(path, device="cpu", **arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"page_sise": 16}, "'page_sise'"),
        ({"page_size": "16"}, "'page_size' must be a whole number, not text"),
        ({"page_size": 3}, "--page-size"),
        ({"page_size": True}, "'page_size' must be"),
        ({"max_total_tokens": 1.5}, "'max_total_tokens' must be"),
        ({"disable_radix_cache": "no"}, "'disable_radix_cache' must be true or false"),
        ({"cuda_graph_bs": [1, "2"]}, "'cuda_graph_bs' must be"),
        ({"dtype": "float8"}, "--dtype"),
        ({"context_length": 2000}, "--context-length"),
        ({"json_model_override_args": "{"}, "--json-model-override-args"),
        ({"attention_backend": "triton"}, "--attention-backend"),
        ({"tokenizer_path": "/nowhere"}, "/nowhere"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], word: str, folder: Path) -> None:
    assert word in start_refused(folder, **arguments)


@pytest.mark.parametrize("path", [3, b"folder", ["folder"], 1.5])
def test_a_path_of_a_wrong_type_is_refused(path: Any) -> None:
    assert "'model_path' must be a path" in start_refused(path)


def rewrite(path: Path, **changes: Any) -> None:
    values = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


BAD_FOLDERS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no config": (lambda p: (p / "config.json").unlink(), "config.json"),
    "broken config": (lambda p: (p / "config.json").write_text("{"), "config.json"),
    "no weights": (lambda p: (p / "model.safetensors").unlink(), "safetensors"),
    "truncated weights": (lambda p: truncate(p / "model.safetensors"), "model.safetensors"),
    "no tokenizer": (lambda p: (p / "tokenizer.json").unlink(), "tokenizer.json"),
    "broken tokenizer": (lambda p: truncate(p / "tokenizer.json"), "tokenizer.json"),
    "architecture": (lambda p: rewrite(p / "config.json", architectures=["BertModel"]), "BertModel"),
    "shape": (lambda p: rewrite(p / "config.json", intermediate_size=96), "shape"),
    "too few layers": (lambda p: rewrite(p / "config.json", num_hidden_layers=3), "lacks tensor"),
    "too many layers": (lambda p: rewrite(p / "config.json", num_hidden_layers=1), "not part of"),
    "missing key": (lambda p: rewrite(p / "config.json", hidden_size=None), "hidden_size"),
}


@pytest.mark.parametrize("case", BAD_FOLDERS)
def test_bad_folders(case: str, folder: Path, tmp_path: Path) -> None:
    spoil, word = BAD_FOLDERS[case]
    path = tmp_path / "model"
    shutil.copytree(folder, path)
    spoil(path)
    assert word in start_refused(path)


def test_bad_paths(tmp_path: Path) -> None:
    assert "does not exist" in start_refused(tmp_path / "absent")
    assert "no config.json" in start_refused(tmp_path)
    gguf = make_tiny_model(tmp_path / "tiny.gguf", format="gguf")
    truncate(gguf)
    assert "tiny.gguf" in start_refused(gguf)


def test_overrides_hold_when_the_weights_are_loaded(folder: Path, engine: Engine, tmp_path: Path) -> None:
    """A config that only the overrides make whole is whole for the loader too."""
    path = tmp_path / "model"
    shutil.copytree(folder, path)
    rewrite(path / "config.json", num_hidden_layers=None)
    assert "num_hidden_layers" in start_refused(path)
    with Engine(path, device="cpu", json_model_override_args='{"num_hidden_layers": 2}') as other:
        assert other.generate(PROMPTS[0], short())["output_ids"] == engine.generate(PROMPTS[0], short())["output_ids"]
