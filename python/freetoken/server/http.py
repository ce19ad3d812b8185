"""The HTTP application: routes, key, body limit, error envelope (torch-free)."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import freetoken
from freetoken import environ, messages
from freetoken.errors import RequestError
from freetoken.sampling_params import SamplingParams
from freetoken.server import metrics, openapi, page, wire
from freetoken.server.anthropic import read_messages_request
from freetoken.server.anthropic_response import MessagesWriter
from freetoken.server.chat import read_chat_prompt, read_tools
from freetoken.server.frontend import Frontend
from freetoken.server.generate import GenerateWriter, read_generate
from freetoken.server.generation import Prompt
from freetoken.server.live import live_view
from freetoken.server.openai import WireRequest, read_chat, read_completion
from freetoken.server.openai_response import OpenAIWriter
from freetoken.server.openai_responses import read_responses
from freetoken.server.openai_responses_writer import ResponsesWriter
from freetoken.server.request_log import RequestLog
from freetoken.server.responses import JSON, GenerationResponse, error_response

log = logging.getLogger(__name__)
Handler = Callable[[Request], Awaitable[Response]]

LARGE_BODY = 2**20
"""Bytes from which a body is parsed on a thread."""
DROPPED_BODIES, DROP_SECONDS = 4, 5.0
"""How much of a body that is too large is read and dropped before the answer, in times the limit, and for how long at most."""
_OPEN_PATHS = ("/health", "/")
_PAGE, _PAGE_HEADERS = page.load()


class Guard:
    """Checks the key before any route is looked up, on every path but ``/health`` and the page, which holds no secret and is
    where a person types the key."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._key = api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in _OPEN_PATHS and not self._allowed(scope["headers"]):
            error = RequestError("the API key is missing or wrong", status=401, code="invalid_api_key")
            await error_response(error, scope["path"])(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _allowed(self, headers: list[tuple[bytes, bytes]]) -> bool:
        given = b""
        for name, value in headers:
            if name == b"authorization" and value[:7].lower() == b"bearer ":
                given = value[7:].strip()
            elif name == b"x-api-key":
                given = given or value.strip()
        return hmac.compare_digest(given, self._key)


class Origins:
    """Refuses what the pages of foreign sites send: a browser asks first only before some kinds of requests, and others it
    sends at once and merely hides the answer. ``allowed`` are the origins that may, beside the server's own.

    Foreign is a request whose ``Origin`` names another host or port than its ``Host``, and a POST that the browser itself
    calls cross-site. A request without either header is not a page's, and passes; so does a page whose name was made to
    resolve to this server, which sends that name as ``Host`` too: only a key keeps it out.
    """

    def __init__(self, app: ASGIApp, allowed: tuple[str, ...]) -> None:
        self._app, self._allowed = app, {origin.lower().encode() for origin in allowed}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # A browser's question beforehand (OPTIONS) is answered by whoever keeps the list.
        if (
            scope["type"] == "http"
            and scope["method"] != "OPTIONS"
            and self._foreign(scope["method"], scope["headers"])
        ):
            error = RequestError(
                "pages of this origin may not call the server (--cors-allow-origins)", status=403, code="origin"
            )
            await error_response(error, scope["path"])(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _foreign(self, method: str, headers: list[tuple[bytes, bytes]]) -> bool:
        named = dict(headers)
        origin = named.get(b"origin")
        if b"*" in self._allowed or (origin is not None and origin.lower() in self._allowed):
            return False
        if origin is not None and not _same_host(origin, named.get(b"host", b"")):
            return True
        return method == "POST" and named.get(b"sec-fetch-site") == b"cross-site"


def _same_host(origin: bytes, host: bytes) -> bool:
    """Whether an origin is of ``host`` (with its port), whatever its scheme: TLS may end in front of this server."""
    scheme, separator, place = origin.lower().partition(b"://")
    return bool(separator) and scheme in (b"http", b"https") and place == host.strip().lower()


class SlowClient:
    """Every piece of an answer waits before it is sent: a fault for tests."""

    def __init__(self, app: ASGIApp, seconds: float) -> None:
        log.warning("FREETOKEN_FAULT_SLOW_CLIENT=%g: this server is slow on purpose", seconds)
        self._app, self._seconds = app, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def slowly(message: Message) -> None:
            await asyncio.sleep(self._seconds)
            await send(message)

        await self._app(scope, receive, slowly)


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body; 413 where it is over ``limit`` bytes.

    Many clients look for an answer only when all is sent, so that one who closes early is one who resets: some of what is too much is
    read and dropped first, but from a client that asked before it sends.
    """
    error = RequestError(
        f"the body is larger than {limit} bytes (--max-request-bytes)", status=413, code="request_too_large"
    )
    length = request.headers.get("content-length", "")
    declared = int(length[:20]) if length.isdigit() else 0
    if declared > limit and ("expect" in request.headers or declared > DROPPED_BODIES * limit):
        raise error
    data, parts = bytearray(), request.stream()
    if declared <= limit:
        async for part in parts:
            data += part
            if len(data) > limit:
                break
        else:
            return bytes(data)
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(_drop(parts, DROPPED_BODIES * limit), DROP_SECONDS)
    raise error


async def _drop(parts: AsyncIterator[bytes], most: int) -> None:
    seen = 0
    async for part in parts:
        seen += len(part)
        if seen > most:
            return


class Server:
    """The handlers. One method a route."""

    def __init__(self, frontend: Frontend) -> None:
        self.frontend = frontend
        self.config = frontend.config
        self.started = int(time.time())
        # One at a time: the objects of a large body take many times its size.
        self._large_bodies = ThreadPoolExecutor(1, thread_name_prefix="freetoken-body")

    async def _body(self, request: Request) -> dict[str, Any]:
        data = await read_body(request, self.config.max_request_bytes)
        if len(data) < LARGE_BODY:
            return wire.parse_object(data)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._large_bodies, wire.parse_large_object, data)

    async def _optional_body(self, request: Request) -> dict[str, Any]:
        """For calls that need none: an empty body is an empty object."""
        if request.method == "GET" or request.headers.get("content-length", "0") == "0":
            return {}
        return await self._body(request)

    # --- generation ---------------------------------------------------------------------------------------------------

    async def chat(self, request: Request) -> Response:
        """Chat completion, whole or streamed."""
        self.frontend.check_serving()
        return self._openai(read_chat(await self._body(request), self.config))

    async def completions(self, request: Request) -> Response:
        """Text completion of one prompt or several, whole or streamed."""
        self.frontend.check_serving()
        return self._openai(read_completion(await self._body(request), self.config))

    def _openai(self, wired: WireRequest) -> Response:
        writer = OpenAIWriter(
            wired,
            self.frontend.tokenizer,
            self.config.served_model_name,
            int(time.time()),
            self.frontend.prompts.dialects,
        )
        return GenerationResponse(self.frontend, wired.spec, writer)

    async def generate(self, request: Request) -> Response:
        """SGLang's native form."""
        self.frontend.check_serving()
        read = read_generate(await self._body(request), self.config)
        return GenerationResponse(self.frontend, read.spec, GenerateWriter(read, self.frontend.tokenizer))

    async def anthropic_messages(self, request: Request) -> Response:
        """Anthropic's messages, whole or streamed."""
        self.frontend.check_serving()
        read = read_messages_request(await self._body(request), self.config)
        writer = MessagesWriter(read, self.config.served_model_name, self.frontend.prompts.dialects)
        return GenerationResponse(self.frontend, read.spec, writer)

    async def count_tokens(self, request: Request) -> Response:
        """Prompt tokens of a body of ``/v1/messages``."""
        prompt = read_messages_request(await self._body(request), self.config, counting=True).spec.prompts[0]
        ids, _ = await self.frontend.in_thread(lambda: self.frontend.prompts.ids(prompt, check_length=False))
        return JSON({"input_tokens": len(ids)})

    async def responses(self, request: Request) -> Response:
        """OpenAI's responses without a store, whole or streamed."""
        self.frontend.check_serving()
        read = read_responses(await self._body(request), self.config)
        writer = ResponsesWriter(read, self.config.served_model_name, int(time.time()), self.frontend.prompts.dialects)
        return GenerationResponse(self.frontend, read.spec, writer)

    # --- tokens -------------------------------------------------------------------------------------------------------

    async def tokenize(self, request: Request) -> Response:
        """Token ids of ``prompt`` (a string or a list of strings) or of ``messages``."""
        body = await self._body(request)
        wire.check_model(body, self.config.served_model_name)
        special = wire.boolean(body, "add_special_tokens", True)
        limit = self.config.context_length
        if body.get("prompt") is None and body.get("messages") is None:
            raise RequestError("give prompt or messages", param="prompt")
        if body.get("prompt") is None:
            prompt = Prompt(SamplingParams(), chat=read_chat_prompt(body, read_tools(body)), param="messages")
            ids = await self.frontend.in_thread(lambda: self.frontend.prompts.ids(prompt, check_length=False)[0])
            return JSON({"tokens": ids, "count": len(ids), "max_model_len": limit})
        texts = body["prompt"] if isinstance(body["prompt"], list) else [body["prompt"]]
        if not all(isinstance(text, str) for text in texts):
            raise RequestError("prompt must be a string or a list of strings", param="prompt")
        encode = self.frontend.tokenizer.encode
        found = await self.frontend.in_thread(lambda: [encode(text, add_special_tokens=special) for text in texts])
        if isinstance(body["prompt"], list):
            return JSON({"tokens": found, "count": [len(ids) for ids in found], "max_model_len": limit})
        return JSON({"tokens": found[0], "count": len(found[0]), "max_model_len": limit})

    async def detokenize(self, request: Request) -> Response:
        """Text of ``tokens`` (a list of ids, or a list of such lists)."""
        body = await self._body(request)
        wire.check_model(body, self.config.served_model_name)
        skip = wire.boolean(body, "skip_special_tokens", True)
        value = body.get("tokens")
        many = isinstance(value, list) and bool(value) and isinstance(value[0], list)
        lists = [wire.token_ids(ids, "tokens") for ids in (value if many and isinstance(value, list) else [value])]
        size = self.frontend.tokenizer.size
        if any(token >= size for ids in lists for token in ids):
            raise RequestError(f"tokens holds an id outside the tokenizer's {size}", param="tokens")
        decode = self.frontend.tokenizer.decode
        texts = await self.frontend.in_thread(lambda: [decode(ids, skip_special_tokens=skip) for ids in lists])
        shown = texts if many else texts[0]
        return JSON({"text": shown, "prompt": shown})

    # --- looking in ---------------------------------------------------------------------------------------------------

    async def models(self, request: Request) -> Response:
        """The one served model."""
        return JSON({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        """The served model, if ``name`` is it."""
        wire.check_model({"model": request.path_params["name"]}, self.config.served_model_name)
        return JSON(self._model())

    def _model(self) -> dict[str, Any]:
        return {
            "id": self.config.served_model_name,
            "object": "model",
            "created": self.started,
            "owned_by": "freetoken",
            "max_model_len": self.config.context_length,
        }

    async def health(self, request: Request) -> Response:
        """200 when requests are served; 503 with the phase while loading, and when the scheduler is gone."""
        status = self.frontend.status
        value: dict[str, Any] = {"status": status.state}
        if status.state == "loading":
            value.update(phase=status.phase, done=status.done, total=status.total, unit=status.unit)
        if status.reason:
            value["reason"] = status.reason
        return JSON(value, status_code=200 if status.state == "ready" else 503)

    async def health_generate(self, request: Request) -> Response:
        """200 once a token has come through the model."""
        self.frontend.check_serving()
        await self.frontend.probe()
        return JSON({"status": "ready"})

    async def server_info(self, request: Request) -> Response:
        """Resolved arguments, kernels in use, cache sizes and the scheduler's live numbers."""
        live: dict[str, Any] = {}
        if self.frontend.status.state in ("ready", "draining"):
            live = (await self.frontend.call(lambda call: messages.GetInfo(call))).info
        return JSON(
            {
                "version": freetoken.__version__,
                "status": self.frontend.status.state,
                "args": self.config.public(),
                "reasoning_parser": self.frontend.prompts.dialects.reasoning,
                "tool_call_parser": self.frontend.prompts.dialects.tool_calls,
                **self.frontend.info,
                "live": live,
                "stats": msgspec.to_builtins(self.frontend.stats),
            }
        )

    async def page(self, request: Request) -> Response:
        """The page: chat, and a live view of the server."""
        return Response(_PAGE, headers=_PAGE_HEADERS)

    async def live(self, request: Request) -> Response:
        """The numbers of the page's live view."""
        return JSON(live_view(self.frontend))

    async def metrics(self, request: Request) -> Response:
        """Prometheus' text format."""
        return Response(self.frontend.metrics.text(), headers={"content-type": metrics.CONTENT_TYPE})

    # --- control ------------------------------------------------------------------------------------------------------

    async def abort_request(self, request: Request) -> Response:
        """Abort the request ``rid``, or all with ``abort_all``. An unknown id is no error: it may just have ended."""
        body = await self._body(request)
        everything = wire.boolean(body, "abort_all", False)
        rid = wire.string(body, "rid")
        if rid is None and not everything:
            raise RequestError("give rid, or abort_all true", param="rid")
        return JSON({"aborted": self.frontend.abort(None if everything else rid)})

    async def flush_cache(self, request: Request) -> Response:
        """Empty the prefix cache; 409 while it cannot be."""
        return await self._control(lambda call: messages.FlushCache(call))

    async def start_profile(self, request: Request) -> Response:
        """Start the profiler; ``output_dir`` says where its trace goes."""
        body = await self._optional_body(request)
        if unknown := sorted(set(body) - {"output_dir"}):
            raise RequestError(f"{unknown[0]} is no field of this call", param=unknown[0])
        folder = wire.string(body, "output_dir") or ""
        return await self._control(lambda call: messages.Profile(call, True, folder))

    async def stop_profile(self, request: Request) -> Response:
        """Stop the profiler and write its trace."""
        return await self._control(lambda call: messages.Profile(call, False), timeout=600.0)

    async def _control(self, make: Callable[[int], messages.ToScheduler], timeout: float = 60.0) -> Response:
        self.frontend.check_serving()
        reply = await self.frontend.call(make, timeout)
        if not reply.ok:
            raise RequestError(reply.message or "the scheduler refused", status=409, code="refused")
        return JSON({"success": True, "message": reply.message, **reply.info})


def build_app(frontend: Frontend) -> ASGIApp:
    """The application behind the key if there is one, the allow-list of origins and the log of requests."""
    config = frontend.config
    app = FastAPI(title="freetoken", version=freetoken.__version__, docs_url=None, redoc_url=None)
    server = Server(frontend)
    for path, method, handler in _routes(server):
        extra = openapi.operation(path.replace(":path", ""), method)
        app.add_api_route(path, handler, methods=method.split(), response_class=JSON, openapi_extra=extra)
    app.add_api_route("/", server.page, methods=["GET"], include_in_schema=False)
    looks = [("/", server.page), *((path, handler) for path, method, handler in _routes(server) if method == "GET")]
    if config.enable_metrics:
        app.add_api_route("/metrics", server.metrics, methods=["GET"])
        looks.append(("/metrics", server.metrics))
    for path, handler in looks:
        # Answered like GET; the body stays with the HTTP library.
        app.add_api_route(path, handler, methods=["HEAD"], include_in_schema=False)
    app.add_exception_handler(RequestError, _on_request_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)
    app.add_exception_handler(Exception, _on_crash)
    wrapped: ASGIApp = Guard(app, config.api_key) if config.api_key else app
    wrapped = Origins(wrapped, config.cors_allow_origins)
    if config.cors_allow_origins:
        wrapped = CORSMiddleware(
            wrapped, config.cors_allow_origins, allow_methods=("GET", "POST"), allow_headers=("*",), max_age=3600
        )
    if delay := float(environ.get("FREETOKEN_FAULT_SLOW_CLIENT")):
        wrapped = SlowClient(wrapped, delay)
    return wrapped if config.log_requests == "off" else RequestLog(wrapped)


def _routes(server: Server) -> list[tuple[str, str, Handler]]:
    return [
        ("/v1/chat/completions", "POST", server.chat),
        ("/v1/completions", "POST", server.completions),
        ("/v1/messages", "POST", server.anthropic_messages),
        ("/v1/messages/count_tokens", "POST", server.count_tokens),
        ("/v1/responses", "POST", server.responses),
        ("/v1/models", "GET", server.models),
        ("/v1/models/{name:path}", "GET", server.model),
        ("/generate", "POST", server.generate),
        ("/tokenize", "POST", server.tokenize),
        ("/detokenize", "POST", server.detokenize),
        ("/health", "GET", server.health),
        ("/health_generate", "GET", server.health_generate),
        ("/get_server_info", "GET", server.server_info),
        ("/live", "GET", server.live),
        ("/abort_request", "POST", server.abort_request),
        ("/flush_cache", "POST", server.flush_cache),
        ("/start_profile", "POST", server.start_profile),
        ("/stop_profile", "POST", server.stop_profile),
    ]


async def _on_request_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return error_response(error, request.url.path)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    messages_by_status = {
        404: f"there is no {request.url.path[:200]} here",
        405: f"{request.method} is not allowed on {request.url.path[:200]}",
    }
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "http_error")
    response = error_response(
        RequestError(messages_by_status.get(error.status_code, str(error.detail)), status=error.status_code, code=code),
        request.url.path,
    )
    for name, value in (error.headers or {}).items():
        response.headers[name] = value
    return response


async def _on_disconnect(request: Request, error: Exception) -> Response:
    return Response(status_code=499)


async def _on_crash(request: Request, error: Exception) -> Response:
    """The process edge: the trace goes to the log, one sentence to the client."""
    log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    internal = RequestError("internal error; the log has details", status=500, code="internal_error")
    return error_response(internal, request.url.path)
