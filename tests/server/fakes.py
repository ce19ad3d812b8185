"""Stand-ins for the other side of the HTTP process: a small byte-level tokenizer, and a scheduler without a model."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import zmq

from freetoken import messages
from freetoken.hardware import Facts
from freetoken.messages import Channel, Finish, RequestOutput, StepOutput, TokenLogprob
from freetoken.models.config import ModelConfig
from freetoken.resolve import resolve
from freetoken.sampling_params import SamplingParams
from freetoken.server_args import Config, ServerArgs

PIECES = [b"he", b"llo", b" wor", b"ld", b"STO", b"P!", "é".encode(), "日本".encode()]
SPECIALS = ["<bos>", "<|im_start|>", "<|im_end|>"]
BOS, START, EOS = 300, 301, 302
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class ByteTokenizer:
    """Ids 0-255 are bytes, 256 and up the ``PIECES``, 300 and up the ``SPECIALS``; encodes byte by byte."""

    byte_level = True
    size = 303
    special_ids = frozenset({BOS, START, EOS})
    bos_token = "<bos>"
    eos_token = "<|im_end|>"

    def __init__(self, chat_template: str | None = CHATML) -> None:
        self.chat_template = chat_template
        self.encoded: list[str] = []

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        self.encoded.append(text)
        ids: list[int] = [BOS] if add_special_tokens else []
        while text:
            for number, special in enumerate(SPECIALS):
                if text.startswith(special):
                    ids.append(BOS + number)
                    text = text[len(special) :]
                    break
            else:
                ids.extend(text[0].encode())
                text = text[1:]
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        kept = [i for i in ids if not (skip_special_tokens and i in self.special_ids)]
        return b"".join(map(self.token_bytes, kept)).decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        if token >= BOS:
            return SPECIALS[token - BOS].encode()
        if token < 256:
            return bytes([token])
        return PIECES[token - 256] if token - 256 < len(PIECES) else b"?"

    def token_text(self, token: int) -> str:
        return self.token_bytes(token).decode("utf-8", "replace")


def make_config(**values: object) -> Config:
    """A configuration as the server would resolve it for a tiny model on a CPU."""
    defaults = values.pop("sampling_defaults", {})
    model = ModelConfig(
        architecture="LlamaForCausalLM",
        name="tiny",
        vocab_size=310,
        hidden_size=8,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        intermediate_size=8,
        rms_norm_eps=1e-5,
        rope_theta=1e4,
        max_position_embeddings=values.pop("positions", 4096),
        tie_word_embeddings=True,
        bos_token_id=BOS,
        eos_token_ids=(EOS,),
        sampling_defaults=defaults,
    )
    args = ServerArgs.from_dict({"device": "cpu", **values})
    return resolve(args, Facts(0, False, 2, 2**33), model, model_path="tiny", seed=1, tokenizer_size=303)


@dataclass
class Running:
    """One sequence in the fake scheduler. ``script`` is all it will say; without one it says letters for ever."""

    rid: str
    ids: list[int]
    sampling: SamplingParams
    limit: int
    script: list[int] | None
    kind: str = ""
    said: int = 0
    pauses: int = 200


@dataclass
class FakeScheduler:
    """Speaks the real protocol. What it does with a prompt is written in the prompt's text:

    ``say:TEXT`` answers TEXT and ends; ``ids:1,2,3`` answers these ids and ends; ``full:`` is refused, ``fail:`` is an
    error at once and ``late:`` one after three tokens; ``die:`` kills the process; ``hang:`` says nothing; anything else
    is answered with letters until the limit.
    """

    config: Config
    folder: str
    delay: float = 0.001
    added: list[messages.AddRequest] = field(default_factory=list)
    aborted: list[str | None] = field(default_factory=list)
    flushes: int = 0
    refuse_flush: bool = False
    steps: int = 0
    live: dict[str, Running] = field(default_factory=dict)
    exit_code: int | None = None

    def run(self, ready: bool = True) -> int:
        context = zmq.Context()
        self.pull, self.push = Channel(self.folder).scheduler_sockets(context)
        try:
            if ready:
                self.send(messages.Loading("weights", 1, 2))
                self.send(messages.Ready(info()))
            while self.exit_code is None:
                if not self.live:
                    self.pull.poll(50)
                for data in messages.drain_socket(self.pull):
                    self.handle(messages.decode_to_scheduler(data))
                if self.live:
                    self.step()
                    time.sleep(self.delay)
            return self.exit_code
        finally:
            context.destroy(linger=1000)

    def send(self, message: messages.ToFrontend) -> None:
        self.push.send(messages.encode(message))

    def handle(self, message: messages.ToScheduler) -> None:
        if isinstance(message, messages.AddRequest):
            self.added.append(message)
            self.live[message.rid] = self.start(message)
        elif isinstance(message, messages.AbortRequest):
            self.aborted.append(message.rid)
            for rid in [message.rid] if message.rid else list(self.live):
                run = self.live.pop(rid, None)
                if run is not None:
                    self.send(StepOutput([self.output(run, [], Finish("abort"))]))
        elif isinstance(message, messages.FlushCache):
            self.flushes += 1
            self.send(messages.ControlReply(message.call, not self.refuse_flush, "busy" if self.refuse_flush else "ok"))
        elif isinstance(message, messages.GetInfo):
            facts = {"added": len(self.added), "aborted": self.aborted, "live": len(self.live), "pid": os.getpid()}
            self.send(messages.ControlReply(message.call, True, info=facts))
        elif isinstance(message, messages.Profile):
            self.send(messages.ControlReply(message.call, True, info={"folder": message.folder}))
        elif isinstance(message, messages.Shutdown):
            while message.drain and self.live:
                self.step()
            self.exit_code = 0

    def start(self, message: messages.AddRequest) -> Running:
        text = bytes(i for i in message.ids if i < 256).decode("utf-8", "replace")
        script = None
        if "say:" in text:
            said = text.rpartition("say:")[2].partition("\n")[0]
            script = [*said.encode(), EOS]
        elif "ids:" in text:
            script = [*map(int, text.rpartition("ids:")[2].partition("\n")[0].split(",")), EOS]
        elif "die:" in text:
            os.kill(os.getpid(), signal.SIGKILL)
        room = self.config.context_length - len(message.ids)
        limit = min(message.sampling.max_new_tokens or room, room)
        kind = next((kind for kind in ("fail:", "late:", "full:", "hang:") if kind in text), "")
        return Running(message.rid, message.ids, message.sampling, limit, script, kind)

    def step(self) -> None:
        self.steps += 1
        outputs = []
        for run in list(self.live.values()):
            if run.kind == "hang:":
                continue
            if run.kind == "late:" and run.said == 3 and run.pauses:
                # The server must have read the tokens before, however busy the machine is.
                run.pauses -= 1
                continue
            if run.kind == "full:":
                finish = Finish("error", message="the queue is full", status=503, code="queue_full")
                outputs.append(self.output(run, [], finish))
            elif run.kind == "fail:" or (run.kind == "late:" and run.said == 3):
                finish = Finish(
                    "error", message="the pool can never hold this", status=400, code="too_long", param="prompt"
                )
                outputs.append(self.output(run, [], finish))
            else:
                outputs.append(self.next(run))
            if outputs[-1].finish is not None:
                del self.live[run.rid]
        stats = messages.SchedulerStats(running=len(self.live), total_tokens=1000, used_tokens=10, steps=self.steps)
        if outputs:
            self.send(StepOutput(outputs, stats))

    def next(self, run: Running) -> RequestOutput:
        token = ord("a") + run.said % 26 if run.script is None else run.script[min(run.said, len(run.script) - 1)]
        run.said += 1
        finish = None
        ends = {*run.sampling.stop_token_ids} | (set() if run.sampling.ignore_eos else {EOS})
        if token in ends:
            finish = Finish("stop", matched=token)
        elif run.said >= run.limit:
            finish = Finish("length")
        return self.output(run, [token], finish)

    def output(self, run: Running, ids: list[int], finish: Finish | None) -> RequestOutput:
        first = run.said == 1
        logprobs = None
        if run.sampling.logprobs is not None and ids:
            logprobs = [entry(token, run.sampling.logprobs) for token in ids]
        prompt = None
        if run.sampling.prompt_logprobs is not None and first:
            prompt = [TokenLogprob(run.ids[0], None)]
            prompt += [entry(token, run.sampling.prompt_logprobs) for token in run.ids[1:]]
        return RequestOutput(
            run.rid,
            ids,
            len(run.ids),
            run.said,
            min(7, len(run.ids) - 1),
            finish,
            logprobs,
            prompt,
            0.001 if first else None,
        )


def entry(token: int, top: int) -> TokenLogprob:
    """A log-probability that can be told from the id."""
    return TokenLogprob(token, -token / 100, [token, 65][:top], [-token / 100, float("-inf")][:top])


def info() -> dict[str, object]:
    return {"max_total_tokens": 1000, "kernels": {"norm": "reference"}}


def run_scheduler(config: Config, folder: str) -> int:
    """The child's entry in tests of the whole server."""
    return FakeScheduler(config, folder).run()


def run_failing(config: Config, folder: str) -> int:
    """A child that cannot load its model."""
    context = zmq.Context()
    _, push = Channel(folder).scheduler_sockets(context)
    push.send(messages.encode(messages.Failed("the file model.safetensors is cut short")))
    context.destroy(linger=1000)
    return 1


def run_dying(config: Config, folder: str) -> int:
    """A child that dies without a word."""
    os.kill(os.getpid(), signal.SIGKILL)
    return 0


def run_slow_start(config: Config, folder: str) -> int:
    """A child that loads for a while."""
    context = zmq.Context()
    _, push = Channel(folder).scheduler_sockets(context)
    push.send(messages.encode(messages.Loading("weights", 3 * 2**20, 4 * 2**20)))
    time.sleep(30)
    return 0


def in_thread(scheduler: FakeScheduler, ready: bool = True) -> threading.Thread:
    thread = threading.Thread(target=scheduler.run, args=(ready,), daemon=True)
    thread.start()
    return thread


def run_120(config: Config, folder: str) -> int:
    """A scheduler of 120 steps a second, to measure the HTTP process with."""
    return FakeScheduler(config, folder, delay=1 / 120).run()
