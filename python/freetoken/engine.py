"""``Engine``: the offline API over the same scheduler, in the calling process."""

from __future__ import annotations

import itertools
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from freetoken.errors import FreetokenError, RequestError, StartupError
from freetoken.grammar.compiler import GrammarCompiler
from freetoken.messages import AddRequest, Finish, RequestOutput, TokenLogprob
from freetoken.sampling_params import SamplingParams
from freetoken.server.detokenizer import OutputText
from freetoken.server_args import ServerArgs
from freetoken.startup import prepare


@dataclass
class _Live:
    """One sequence being generated."""

    rid: str
    params: SamplingParams
    text: OutputText
    prompt_tokens: int
    field_name: str
    ids: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] | None = None
    cached_tokens: int = 0
    finish: dict[str, Any] | None = None
    error: RequestError | None = None
    updated: bool = False

    @property
    def done(self) -> bool:
        return self.finish is not None or self.error is not None


def _token_lists(given: Any) -> tuple[bool, list[list[int]]]:
    """``(whether it is one prompt, its token ids or those of each)``; :class:`RequestError` for anything else."""
    single = isinstance(given, list | tuple) and not any(isinstance(item, list | tuple) for item in given)
    lists = [given] if single else given
    if isinstance(lists, list | tuple) and all(isinstance(ids, list | tuple) for ids in lists):
        prompts = [list(ids) for ids in lists]
        if all(isinstance(token, int) and not isinstance(token, bool) for ids in prompts for token in ids):
            return single, prompts
    raise RequestError("input_ids must be a list of integers or a list of such lists", param="input_ids")


class Engine:
    """Generate text without HTTP.

    ``model_path`` is a folder of safetensors or a ``.gguf`` file (``None``: the embedded demo model); further keywords
    are the server's flags (``docs/flags.md``) with underscores; the queue is unbounded unless they say otherwise. Raises
    :class:`~freetoken.errors.StartupError` when the model cannot be started. Safe to use from several threads; use it as a
    context manager or call :meth:`shutdown` to free the memory.
    """

    def __init__(
        self,
        model_path: str | os.PathLike[str] | None = None,
        *,
        device: str = "auto",
        dtype: str = "auto",
        **server_args: Any,
    ) -> None:
        from freetoken.runner.model_runner import ModelRunner
        from freetoken.scheduler.grammar import Grammars
        from freetoken.scheduler.scheduler import Scheduler

        if model_path is not None and not isinstance(model_path, str | os.PathLike):
            raise StartupError(f"argument 'model_path' must be a path, not {type(model_path).__name__}")
        path = model_path if model_path is None else os.fspath(model_path)
        # A server bounds its queue to answer soon; a list given to generate() is to be worked off whole.
        unbounded = {"max_queued_requests": sys.maxsize, "max_queued_tokens": sys.maxsize}
        args = ServerArgs.from_dict({**unbounded, "model_path": path, "device": device, "dtype": dtype, **server_args})
        self.config, self.tokenizer = prepare(args)
        self._runner: Any = ModelRunner(self.config)
        tokenizer, config = self.tokenizer, self.config
        self._compiler = GrammarCompiler(lambda: tokenizer, config.sample_vocab, config.model.eos_token_ids)
        self._scheduler: Any = Scheduler(config, self._runner, grammars=Grammars(self._compiler))
        self._live: dict[str, _Live] = {}
        self._counter = itertools.count()
        self._lock = threading.RLock()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def shutdown(self) -> None:
        """End what runs and free the model. Calling it twice does nothing."""
        with self._lock:
            if self._scheduler is None:
                return
            self._scheduler = self._runner = None
        if self.config.device == "cuda":
            import torch

            torch.cuda.empty_cache()

    def generate(
        self,
        prompt: str | Sequence[str] | None = None,
        sampling_params: dict[str, Any] | SamplingParams | Sequence[dict[str, Any] | SamplingParams] | None = None,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        stream: bool = False,
        priority: int = 0,
        return_logprob: bool = False,
        top_logprobs_num: int = 0,
    ) -> dict[str, Any] | list[dict[str, Any]] | Iterator[dict[str, Any]]:
        """Generate for one prompt or a list of them.

        Give ``prompt`` (text) or ``input_ids`` (token ids), and one dictionary of sampling parameters (over the model's
        defaults) or one :class:`SamplingParams` (as it is) for all, or a list with one for each. ``return_logprob`` asks for
        the log-probabilities of the output, and of the ``top_logprobs_num`` most likely tokens beside it, where the sampling
        parameters do not say ``logprobs`` themselves. Returns ``{"text", "output_ids", "meta_info"}`` for a single prompt with ``n`` 1, else a list of
        them in order; with ``stream`` an iterator of such dictionaries with the text so far and, for more than one
        sequence, the ``index`` of the one that grew. Higher ``priority`` goes first, with ``enable_priority_scheduling``. Raises :class:`~freetoken.errors.RequestError` for a bad request.
        """
        asked = {"return_logprob": return_logprob, "top_logprobs_num": top_logprobs_num}
        single, lives = self._submit(prompt, sampling_params, input_ids, priority, asked)
        if stream:
            results = self._stream(lives, single)
            # Started at once, so that dropping the iterator unread ends its requests too.
            next(results)
            return results
        try:
            while not all(live.done for live in lives):
                self._step()
            answers = [self._result(live) for live in lives]
        finally:
            self._forget(lives)
        return answers[0] if single else answers

    def _submit(
        self, prompt: Any, sampling_params: Any, input_ids: Any, priority: int, asked: dict[str, Any]
    ) -> tuple[bool, list[_Live]]:
        if (prompt is None) == (input_ids is None):
            raise RequestError("give either prompt or input_ids", param="prompt")
        if prompt is not None:
            single, prompts = self._encode(prompt)
        else:
            single, prompts = _token_lists(input_ids)
        params = self._params(sampling_params, len(prompts), asked)
        for each in params:
            each.check_vocabulary(self.config.model.vocab_size)
            if each.grammar is not None:
                self._compiler.compile(each.grammar)
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise RequestError("priority must be an integer", param="priority")
        name = "prompt" if input_ids is None else "input_ids"
        with self._lock:
            if self._scheduler is None:
                raise FreetokenError("this engine has been shut down")
            lives = [self._add(ids, p, i, name, priority) for ids, p in zip(prompts, params) for i in range(p.n)]
        return single and len(lives) == 1, lives

    def _encode(self, prompt: Any) -> tuple[bool, list[list[int]]]:
        single = isinstance(prompt, str)
        texts = [prompt] if single else prompt
        if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
            raise RequestError("prompt must be a string or a list of strings", param="prompt")
        try:
            return single, [self.tokenizer.encode(text, add_special_tokens=True) for text in texts]
        except RequestError as error:
            error.param = "prompt"
            raise

    def _params(self, given: Any, count: int, asked: dict[str, Any]) -> list[SamplingParams]:
        if given is None or isinstance(given, dict | SamplingParams):
            return [self._one(given or {}, asked)] * count
        if not isinstance(given, list | tuple):
            raise RequestError("sampling_params must be an object or a list of them", param="sampling_params")
        if len(given) != count:
            raise RequestError(f"{len(given)} sampling_params for {count} prompts", param="sampling_params")
        return [self._one(value, asked) for value in given]

    def _one(self, given: Any, asked: dict[str, Any]) -> SamplingParams:
        """``given`` with the log-probabilities that the call has ``asked`` for, unless it says itself."""
        defaults = self.config.model.sampling_defaults
        if not isinstance(given, SamplingParams):
            return SamplingParams.from_sglang({**asked, **given} if isinstance(given, dict) else given, defaults)
        wanted = SamplingParams.from_sglang(asked, {}).logprobs
        return given if given.logprobs is not None else msgspec.structs.replace(given, logprobs=wanted)

    def _add(self, ids: list[int], params: SamplingParams, choice: int, name: str, priority: int) -> _Live:
        live = _Live(f"engine-{next(self._counter)}", params, OutputText(self.tokenizer, params), len(ids), name)
        self._live[live.rid] = live
        self._scheduler.add(AddRequest(live.rid, ids, params.for_choice(choice), priority))
        return live

    def _step(self) -> None:
        with self._lock:
            if self._scheduler is None:
                raise FreetokenError("this engine has been shut down")
            if self._scheduler.has_work:
                self._dispatch(self._scheduler.step())

    def _dispatch(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            live = self._live.get(output.rid)
            if live is not None and not live.done:
                self._receive(live, output)

    def _receive(self, live: _Live, output: RequestOutput) -> None:
        live.updated = True
        live.ids.extend(output.ids)
        live.logprobs.extend(output.logprobs or ())
        live.prompt_logprobs = output.prompt_logprobs or live.prompt_logprobs
        live.cached_tokens = output.cached_tokens
        finish = output.finish
        stop_token = finish is not None and finish.kind == "stop" and finish.matched is not None
        hidden = stop_token and not live.params.no_stop_trim
        text, matched = live.text.push(output.ids[:-1] if hidden else output.ids)
        if finish is not None and matched is None:
            text += live.text.flush()
            matched = live.text.stopped
        live.pieces.append(text)
        if matched is not None:
            live.finish = {"type": "stop", "matched": matched}
            if finish is None:
                self._scheduler.abort(live.rid)
        elif finish is not None:
            self._finish(live, finish)

    def _finish(self, live: _Live, finish: Finish) -> None:
        if finish.kind == "error":
            param = live.field_name if finish.param == "prompt" else finish.param
            live.error = RequestError(finish.message or "failed", param=param, code=finish.code, status=finish.status)
        elif finish.kind == "stop":
            live.finish = {"type": "stop", "matched": finish.matched}
        elif finish.kind == "length":
            live.finish = {"type": "length", "length": len(live.ids)}
        else:
            live.finish = {"type": finish.kind}

    def _result(self, live: _Live) -> dict[str, Any]:
        if live.error is not None:
            raise live.error
        meta: dict[str, Any] = {
            "id": live.rid,
            "prompt_tokens": live.prompt_tokens,
            "completion_tokens": len(live.ids),
            "cached_tokens": live.cached_tokens,
            "finish_reason": live.finish,
        }
        if live.params.logprobs is not None:
            meta["output_token_logprobs"] = [self._triple(e.logprob, e.id) for e in live.logprobs]
            meta["output_top_logprobs"] = [self._alternatives(e) for e in live.logprobs]
        if live.prompt_logprobs is not None:
            meta["input_token_logprobs"] = [self._triple(e.logprob, e.id) for e in live.prompt_logprobs]
            meta["input_top_logprobs"] = [self._alternatives(e) for e in live.prompt_logprobs]
        return {"text": "".join(live.pieces), "output_ids": list(live.ids), "meta_info": meta}

    def _triple(self, logprob: float | None, token: int) -> tuple[float | None, int, str]:
        return logprob, token, self.tokenizer.token_text(token)

    def _alternatives(self, entry: TokenLogprob) -> list[tuple[float | None, int, str]]:
        return [self._triple(value, token) for token, value in zip(entry.top_ids, entry.top_logprobs)]

    def _stream(self, lives: list[_Live], single: bool) -> Iterator[dict[str, Any]]:
        open_lives = dict(enumerate(lives))
        try:
            yield {}
            while open_lives:
                for index, live in list(open_lives.items()):
                    if live.updated:
                        live.updated = False
                        if live.done:
                            del open_lives[index]
                        result = self._result(live)
                        yield result if single else {**result, "index": index}
                if open_lives and not any(live.updated for live in open_lives.values()):
                    self._step()
        finally:
            self._forget(lives)

    def _forget(self, lives: list[_Live]) -> None:
        with self._lock:
            for live in lives:
                self._live.pop(live.rid, None)
                if not live.done and self._scheduler is not None:
                    self._scheduler.abort(live.rid)
