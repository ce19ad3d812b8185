"""Capture calls of fused ops from a real model run, then replay them through any implementation.

``python -m freetoken.bench.replay capture OUT --model-path MODEL --ops small_gemm --layers 0 1 --positions 0 7`` runs prompts and
decode steps of one batch and writes, for each chosen op, layer and step, every call: its inputs but the parameters, what it changed
in place, its outputs. ``python -m freetoken.bench.replay run OUT --impl triton --versus reference`` loads the same model for the
parameters, compares what the implementations make of the recorded inputs with what was recorded, and times both in turn, under
CUDA graphs on a GPU. Nothing is timed where the comparison fails.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from freetoken.bench import ab_stats, cli, figures
from freetoken.bench.one_batch import BatchDriver, Launched, progress, random_ids
from freetoken.errors import FreetokenError, StartupError
from freetoken.kernels import dispatch
from freetoken.sampling_params import SamplingParams
from freetoken.scheduler.request import ScheduleBatch
from freetoken.server_args import Config, ServerArgs
from freetoken.server_args import parser as server_parser

if TYPE_CHECKING:
    from freetoken.bench.recorder import Call, Recorder
    from freetoken.bench.replay_arm import Arm, Outcome
    from freetoken.bench.replay_store import Capture, Writer
    from freetoken.runner.model_runner import ModelRunner

_CAPTURE = (
    "command",
    "out",
    "ops",
    "layers",
    "positions",
    "prefill",
    "batch_size",
    "input_len",
    "temperature",
    "output",
)
_RUN = ("command", "capture", "impl", "versus", "ops", "layers", "linked", "exact", "bound", "pairs", "output", "label")
_MACHINE = ("device", "mem_fraction_static")
"""Flags that a replay does not take over from the capture."""


class ReplayError(FreetokenError):
    """An implementation does not make what was recorded."""


# --- capture -------------------------------------------------------------------------------------------------------------


class CaptureDriver(BatchDriver):
    """Runs one batch and has ``recorder`` keep the steps asked for: decode steps by number, prompts with ``prefill``."""

    recorder: Recorder
    writer: Writer
    positions: frozenset[int]
    prefill: bool

    def _launch(self, batch: ScheduleBatch) -> Launched:
        if batch.prefills:
            name = f"prefill-{batch.step - 1}" if self.prefill else None
        else:
            index = batch.decodes[0].out_index - 1
            name = f"decode-{index}" if index in self.positions else None
        if name is None:
            return super()._launch(batch)
        self.recorder.begin(name)
        launched = super()._launch(batch)
        self.writer.step(self.recorder.end())
        return launched

    def record(self, recorder: Recorder, writer: Writer, positions: Sequence[int], prefill: bool) -> None:
        """All prompts, then decode steps up to the last of ``positions``."""
        self.recorder, self.writer = recorder, writer
        self.positions, self.prefill = frozenset(positions), prefill
        with recorder:
            self._run(self.prefill_batches())
            steps = max(positions, default=-1) + 1
            for index in range(steps):
                progress("decode steps", index, steps, "steps")
                self._run([self.decode_batch(index)])


def _default(field: dataclasses.Field[Any]) -> Any:
    """What the command line gives where a flag is left out; flags that may be given several values have none of their own."""
    return [] if field.default is dataclasses.MISSING else field.default


def _kept_flags(values: ServerArgs, config: Config) -> dict[str, Any]:
    """The flags with which a replay loads the same model: those not at their defaults, type and seed as they were decided."""
    given = {
        f.name: getattr(values, f.name)
        for f in dataclasses.fields(values)
        if f.name not in _MACHINE and getattr(values, f.name) != _default(f)
    }
    return {**given, "dtype": config.dtype, "random_seed": config.random_seed, "model_path": config.model_path}


def _load(values: ServerArgs) -> tuple[ModelRunner, Config]:
    from freetoken.runner.model_runner import ModelRunner
    from freetoken.startup import prepare

    config, _ = prepare(values)
    return ModelRunner(config, progress), config


def capture(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The ``capture`` command."""
    cli.require_at_least(args, {"batch_size": 1, "input_len": 1, "positions": 0, "layers": 0})
    if not args.positions and not args.prefill:
        raise StartupError("nothing to record: give --positions, --prefill or both")
    from freetoken.bench.recorder import Recorder, parameters_of
    from freetoken.bench.replay_store import Writer, fingerprint

    values = ServerArgs(**cli.server_values(args, _CAPTURE))
    tokens = max(args.positions, default=0) + 2
    values.max_running_requests = values.max_running_requests or args.batch_size
    values.context_length = values.context_length or args.input_len + tokens
    if values.max_total_tokens is None:
        pages = -(-(args.input_len + tokens) // values.page_size)
        values.max_total_tokens = args.batch_size * pages * values.page_size
    if values.state_cache_gb is None:
        values.state_cache_gb = 0.0  # nothing is ever restored here
    # Inside a replayed graph no call can be seen.
    values.disable_cuda_graph = True
    with Writer(Path(args.out)) as writer:
        runner, config = _load(values)
        _require_layers(args.layers, len(runner.model.layers))
        sampling = SamplingParams(max_new_tokens=tokens, temperature=args.temperature, ignore_eos=True)
        prompts = random_ids(config, args.batch_size, args.input_len, 0)
        recorder = Recorder(
            _ops(args.ops),
            parameters=parameters_of(runner.model),
            layers=runner.model.layers,
            only_layers=None if args.layers is None else frozenset(args.layers),
        )
        CaptureDriver(runner, config, prompts, tokens, sampling).record(recorder, writer, args.positions, args.prefill)
        facts = {
            "fingerprint": fingerprint(runner),
            "flags": _kept_flags(values, config),
            "device": config.device,
            "model": config.served_model_name,
            "kernels": {c.op: c.impl for c in (*runner.model.kernel_choices(), *runner.sampler.kernel_choices())},
        }
        count = writer.finish(facts)
    print(f"{count} calls recorded in {args.out}", flush=True)
    return []


def _ops(names: Sequence[str]) -> tuple[str, ...]:
    from freetoken.bench.replay_rows import ROWS

    return tuple(ROWS) if "all" in names else tuple(dict.fromkeys(names))


def _require_layers(layers: Sequence[int] | None, count: int) -> None:
    if layers is not None and max(layers) >= count:
        raise StartupError(f"--layers {max(layers)}: the model's layers are 0 to {count - 1}")


# --- run -----------------------------------------------------------------------------------------------------------------


def run_flags(args: argparse.Namespace, recorded: dict[str, Any]) -> ServerArgs:
    """The flags given, and those of the capture for what was left at its default."""
    values = ServerArgs(**cli.server_values(args, _RUN))
    known = {f.name: f for f in dataclasses.fields(ServerArgs)}
    for name, value in recorded.items():
        if name in known and getattr(values, name) == _default(known[name]):
            setattr(values, name, value)
    return values


def _summary(name: str, impl: str, outcomes: Sequence[Outcome]) -> str:
    mine = [x for x in outcomes if x.call.op_name == name]
    red = [x for x in mine if x.wrong]
    worst = max(x.error for x in mine)
    said = f"{len(red)} differ" if red else "all agree"
    return f"{name:<12} {impl:<12} {len(mine)} calls, {said}, largest relative RMS {worst:.3g}"


def _checked(arm: Arm, found: Capture, calls: Sequence[Call], args: argparse.Namespace) -> dict[str, float]:
    """Largest relative RMS by op; :class:`ReplayError` after a line for each op when any call differs."""
    from freetoken.bench.replay_arm import check

    outcomes = check(arm, found, calls, linked=args.linked, exact=args.exact, bound=args.bound)
    names = list(dict.fromkeys(call.op_name for call in calls))
    for name in names:
        print(_summary(name, arm.impl, outcomes), flush=True)
    red = [outcome.wrong for outcome in outcomes if outcome.wrong]
    if red:
        raise ReplayError(f"{arm.impl}: {len(red)} of {len(outcomes)} calls are not as recorded, first {red[0]}")
    return {name: max(x.error for x in outcomes if x.call.op_name == name) for name in names}


def _timed(
    name: str, a: Arm, b: Arm, found: Capture, calls: Sequence[Call], args: argparse.Namespace, error: float
) -> dict[str, Any]:
    """The figure of one op: ``b`` beside ``a``, and how far two runs of ``a`` lie apart."""
    from freetoken.bench.replay_arm import pairs, passes, thunks

    first, second, graphs = passes(thunks(a, found, calls), thunks(b, found, calls), a.device)
    found.forget()
    control = pairs(first, first, args.pairs, a.device)
    result = ab_stats.compare("us", control, pairs(first, second, args.pairs, a.device), lower_is_better=True)
    us, versus_us = (1e6 * seconds / len(calls) for seconds in (result.b, result.a))
    print(
        f"{name:<12} {b.impl} {us:.2f} us a call, {a.impl} {versus_us:.2f} us, ratio {result.effect.ratio:.3f} "
        f"({result.effect.low:.3f} to {result.effect.high:.3f}), noise {result.floor:.3f}: {result.verdict}",
        flush=True,
    )
    return figures.figure(
        f"replay {name}",
        model=args.label or found.facts["model"],
        device=a.device.type,
        impl=b.impl,
        versus=a.impl,
        calls=len(calls),
        graph=graphs,
        us=us,
        versus_us=versus_us,
        ratio=result.effect.ratio,
        low_ratio=result.effect.low,
        high_ratio=result.effect.high,
        noise_ratio=result.floor,
        verdict=result.verdict,
        relative_rms=error,
    )


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The ``run`` command; :class:`ReplayError` when an implementation does not make what was recorded."""
    cli.require_at_least(args, {"pairs": 2, "layers": 0})
    cli.require_bound(args.bound)
    import torch

    from freetoken.bench.recorder import parameters_of
    from freetoken.bench.replay_arm import Arm
    from freetoken.bench.replay_rows import ROWS
    from freetoken.bench.replay_store import Capture, fingerprint, require_same

    found = Capture(Path(args.capture))
    wanted = _ops(args.ops)
    calls = [c for c in found.calls if c.op_name in wanted and (args.layers is None or c.layer in args.layers)]
    if not calls:
        raise StartupError(f"{args.capture} holds no call of {', '.join(args.ops)} in these layers")
    names = list(dict.fromkeys(call.op_name for call in calls))
    runner, config = _load(run_flags(args, found.facts["flags"]))
    require_same(Path(args.capture), found.facts["fingerprint"], fingerprint(runner))
    device, parameters = torch.device(config.device), parameters_of(runner.model)

    def like(name: str) -> Any:
        attribute = ROWS[name].like
        return None if attribute is None else getattr(runner.model.ops, attribute)

    with torch.inference_mode():
        arms = [Arm(impl, names, device, parameters, like) for impl in (args.impl, args.versus) if impl is not None]
        errors, *_ = [_checked(arm, found, calls, args) for arm in arms]
        if args.versus is None:
            return []
        b, a = arms
        return [
            _timed(name, a, b, found, [c for c in calls if c.op_name == name], args, errors[name]) for name in names
        ]


# --- command line --------------------------------------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    """The two commands; each takes the server's flags as well."""
    result = argparse.ArgumentParser(
        prog="python -m freetoken.bench.replay", description=(__doc__ or "").split("\n")[0]
    )
    commands = result.add_subparsers(dest="command", required=True)
    server = server_parser()
    ops = [*(op.name for op in dispatch.OPS if op.folder is None), "attention", "all"]
    add = _command(commands, "capture", server, "Record calls from a run of one batch.")
    add("out", help="Folder to write.")
    add("--ops", nargs="+", default=["all"], choices=ops, help="Ops to record.")
    add("--layers", type=int, nargs="+", help="Layers to record; default: all, and what lies outside of layers.")
    add("--positions", type=int, nargs="*", default=[0], help="Decode steps to record, from 0.")
    add("--prefill", action="store_true", help="Record the prompts' steps as well.")
    add("--batch-size", type=int, default=1, help="Requests in the batch.")
    add("--input-len", type=int, default=128, help="Prompt tokens of each.")
    add("--temperature", type=float, default=0.0, help="Above 0 ids are drawn, else the most likely is taken.")
    add = _command(commands, "run", server, "Replay a capture through implementations.")
    add("capture", help="Folder that was written.")
    add("--impl", required=True, help="reference, host, triton, sgl_kernel, fla, or module:Class.")
    add("--versus", help="The implementation to time against; without one nothing is timed.")
    add("--ops", nargs="+", default=["all"], choices=ops, help="Ops to replay.")
    add("--layers", type=int, nargs="+", help="Layers to replay.")
    add("--linked", action="store_true", help="Feed inputs that were outputs of recorded calls with the replayed ones.")
    add("--exact", action="store_true", help="Ask for equal bits.")
    add("--bound", type=float, help="Largest relative RMS, instead of each op's own.")
    add("--pairs", type=int, default=10, help="Timed pairs.")
    add("--output", help="Append the figures as JSON lines.")
    add("--label", help="What the model is, for the figures; default: its served name.")
    return result


def _command(commands: Any, name: str, server: argparse.ArgumentParser, text: str) -> Any:
    made = commands.add_parser(name, parents=[server], conflict_handler="resolve", add_help=False, help=text)
    made.set_defaults(output=None)
    return made.add_argument_group("replay").add_argument


def main(argv: Sequence[str] | None = None) -> int:
    """Command-line entry; 1 when a capture does not fit or an implementation is wrong."""
    args = parser().parse_args(argv)
    return cli.entry(args, capture if args.command == "capture" else run)


if __name__ == "__main__":
    sys.exit(main())
