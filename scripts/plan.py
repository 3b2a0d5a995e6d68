"""What a training run needs on devices that need not be here, and whether it fits.

Compiles the run's training step with the real compiler of the target (extras plan-tpu, plan-gpu)
for the most trajectories that it draws, and prints bytes of a device by part, FITS or OOM,
operations, an expected time, the ring's messages and what hides them. If it does not fit, changes
are tried until some do. The first argument is a preset or the folder of a run; any setting can be
changed by its flag. Targets: a100-40, a100-80, h100, h200 with a number of GPUs (h200:8), v4, v5e,
v5p, v6e with the shape of a slice (v5e:4x8), cpu with a number of simulated devices (cpu:8).

Exit status: 0 FITS, 1 OOM, 2 an impossible request.

Example:
    python -m scripts.plan at_ring_128 --target h200:8
    python -m scripts.plan at_small_128 --target cpu:8 --data.trajectories 4 --explain
"""

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import jax
import tyro

import ring
from agent.ahead import Compiled, Refused
from agent.checkpoint import CONFIG
from agent.config import TRANSFORMERS, TrainConfig
from agent.plan import EFFICIENCY, PREALLOCATED, USABLE, WAITING, Plan, filled, plan
from agent.presets import PRESETS
from ring import targets
from ring.mesh import AXES
from scripts import apart, command

OOM = 1
MESH = tuple(f"--mesh.{axis}" for axis in AXES)


@dataclass(frozen=True)
class Request:
    """What to plan.

    Attributes:
        config: the run's settings.
        target: devices, such as h200:8, v5e:4x8 or cpu:8.
        task: whose sizes of observations and actions count; short for data.tasks.
        explain: print the largest buffers with the lines that they come from.
        efficiency: fraction of the devices' peak that products are expected to reach.
        suggestions: changes that fit to find when the run does not; 0 tries none.
    """

    config: Annotated[TrainConfig, tyro.conf.arg(name="")]
    target: str
    task: str | None = None
    explain: bool = False
    efficiency: float = EFFICIENCY
    suggestions: int = 3


def parse(arguments: Sequence[str]) -> Request:
    """The request of a command line.

    Raises:
        FileNotFoundError: the first argument is neither a preset nor the folder of a run.
        ValueError: it is the folder of a run whose settings cannot be read, or an option is out of
            its range.
    """
    choices = {name: (preset.description, _preset(name)) for name, preset in PRESETS.items()}
    arguments = list(arguments)
    if arguments and not arguments[0].startswith("-") and arguments[0] not in choices:
        choices = {"run": ("the run of a folder", _run(Path(arguments[0])))}
        arguments[0] = "run"
    wrapped = {
        name: (about, Request(config=config, target=tyro.MISSING))
        for name, (about, config) in choices.items()
    }
    request = tyro.extras.overridable_config_cli(wrapped, description=__doc__, args=arguments)
    if not 0 < request.efficiency <= 1:
        raise ValueError(f"efficiency={request.efficiency} is no fraction of a peak; use 0.35, say")
    if request.suggestions < 0:
        raise ValueError(f"suggestions={request.suggestions} must not be negative; 0 tries none")
    if not request.task:
        return request
    data = replace(request.config.data, tasks=(request.task,))
    return replace(request, config=replace(request.config, data=data))


def _preset(name: str) -> TrainConfig:
    unused = Path("runs") / name
    return PRESETS[name].config(run=unused, store=unused, tasks=("walker_run",))


def _run(folder: Path) -> TrainConfig:
    path = folder / CONFIG
    if not path.is_file():
        raise FileNotFoundError(
            f"{folder} is neither a preset ({', '.join(PRESETS)}) nor the folder of a run: there "
            f"is no {path}"
        )
    try:
        return TrainConfig.from_json(json.loads(path.read_text()))
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is not what training writes ({type(error).__name__}: {error}); was it "
            f"changed, or written by another version?"
        ) from error


def main(arguments: Sequence[str]) -> int:
    """Plan in a process of its own, and return the exit status.

    Raises:
        ValueError: a signal ended the compiler.
    """
    request = parse(arguments)
    status = apart.run(_planned, arguments)
    if status < 0:
        compiler = command.versions(targets.parse(request.target).compiler)
        raise ValueError(
            f"the compiler ({compiler}) was ended by {apart.name(status)} while it compiled for "
            f"{request.target}: a fault of its own where it says that a check failed, want of this "
            f"machine's memory where that is SIGKILL; try another target, --model.block-size, "
            f"--mesh.* or number of trajectories"
        )
    return status


def _planned(arguments: Sequence[str]) -> None:
    command.run(lambda: sys.exit(report(arguments)))


def report(arguments: Sequence[str]) -> int:
    """Plan, print, and return the exit status."""
    request = parse(arguments)
    target = targets.parse(request.target)
    _prepare(target)
    config = meant(arguments, request)
    for line in opening(config, target, chosen=config.mesh != request.config.mesh):
        print(line, flush=True)
    made = plan(config, target, efficiency=request.efficiency, explain=request.explain)
    for line in lines(made, request.efficiency):
        print(line)
    if not made.fits and request.suggestions:
        suggest(made, request, target)
    return 0 if made.fits else OOM


def meant(arguments: Sequence[str], request: Request) -> TrainConfig:
    """What is planned: on the mesh of the command line, or on one that fills the target.

    Raises:
        ValueError: settings that cannot work.
    """
    given = any(name.startswith(MESH) for name in arguments)
    config = request.config if given else filled(request.config, targets.parse(request.target))
    config.check()
    return config


def _prepare(target: targets.Target) -> None:
    """Compiling for other platforms must not start them here."""
    jax.config.update("jax_platforms", "cpu")
    if target.platform == "cpu":
        with contextlib.suppress(RuntimeError):  # JAX has started
            ring.simulate_devices(target.size)
    targets.devices(target)  # refused before anything is printed


def opening(config: TrainConfig, target: targets.Target, chosen: bool) -> Iterator[str]:
    """What is compiled, said before it takes its time."""
    yield f"target      {target}: {command.versions('jax', target.compiler)}"
    mesh = config.mesh
    axes = f"data {mesh.data} × fsdp {mesh.fsdp} × ring {mesh.ring} × tensor {mesh.tensor}"
    yield f"mesh        {axes}{', chosen to fill the target' if chosen else ''}"


def lines(made: Plan, efficiency: float) -> Iterator[str]:
    """The plan for people."""
    yield from _sizes(made)
    yield from _bytes(made)
    yield from _verdict(made)
    yield from _work(made, efficiency)
    yield from _messages(made)
    if made.buffers:
        yield "\nlargest buffers; temporaries that do not live at the same time overlap"
    for each in made.buffers:
        yield (
            f"{size(each.size):>12}  {each.kind:9} {each.shape:32} {each.operation:20} {each.line}"
        )


def _sizes(made: Plan) -> Iterator[str]:
    config, model = made.config, made.config.model
    network = f"network     {config.method}, {made.parameters:,} parameters: {model.layers} × "
    if config.method not in TRANSFORMERS:
        yield f"{network}{model.width}, float32"
        yield f"batch       {made.rows:,} steps"
        return
    yield f"{network}{model.width} × {model.heads}, {model.dtype}, memory {model.memory}"
    chain = f"n = {made.trajectories}, " if config.method == "at" else ""
    yield (
        f"batch       {chain}{made.rows} × {made.steps:,} steps of {config.tokens_per_step} "
        f"tokens, {made.block:,} tokens of a sequence on a device"
    )


def _bytes(made: Plan) -> Iterator[str]:
    counted, program = made.counted, made.program
    compiled = program if isinstance(program, Compiled) else None
    waiting = WAITING * counted.batch
    temporaries = counted.gradients + counted.kept + counted.working + counted.in_flight
    rows = [
        ("  parameters", counted.parameters, None),
        ("  moments of the optimizer", counted.moments, None),
        ("  batch", counted.batch, None),
        ("operands", counted.arguments, compiled and compiled.arguments),
        ("  gradients", counted.gradients, None),
        ("  activations kept for the backward pass", counted.kept, None),
        ("  activations of the block at work", counted.working, None),
        ("  keys, values, gradients in flight", counted.in_flight, made.in_flight),
        ("temporaries", temporaries, compiled and compiled.temporaries),
        ("results and code", None, compiled and compiled.outputs + compiled.code),
        ("batches that wait", waiting, waiting),
        ("total", counted.total + waiting, made.total),
    ]
    yield f"\n{'bytes of a device':42}{'counted':>12}{'compiled':>12}"
    for name, *sizes in rows:
        left, right = ("" if each is None else size(each) for each in sizes)
        yield f"{name:42}{left:>12}{right:>12}"
    if made.caches:
        caches = ", ".join(f"{size(held)} in {dtype}" for dtype, held in made.caches.items())
        yield f"evaluation: cache of N trajectories, a device and chain: {caches}"
    yield ""


def size(count: int) -> str:
    """Bytes for people."""
    unit, name = (2**30, "GiB") if count >= 2**30 else (2**20, "MiB")
    return f"{count / unit:,.2f} {name}"


def work(flops: float) -> str:
    """Operations for people."""
    unit, name = (1e12, "TFLOP") if flops >= 1e12 else (1e9, "GFLOP")
    return f"{flops / unit:,.2f} {name}"


def _verdict(made: Plan) -> Iterator[str]:
    memory, total = made.target.memory, made.total
    if isinstance(made.program, Refused) or total is None:
        yield f"OOM         the compiler refuses: {getattr(made.program, 'message', '')}"
        return
    word = "FITS" if made.fits else "OOM"
    share = f"{size(total)} of {size(memory)} ({total / memory:.1%})"
    yield f"{word:12}{share}"
    if made.target.platform == "cuda" and not made.fits:
        yield f"            XLA does not refuse; a GPU lends {USABLE:.0%} of its memory at most"
    elif made.target.platform == "cuda" and total > PREALLOCATED * memory:
        yield (
            f"            JAX takes {PREALLOCATED:.0%} of a GPU by default: set "
            f"XLA_PYTHON_CLIENT_MEM_FRACTION={USABLE}"
        )


def _work(made: Plan, efficiency: float) -> Iterator[str]:
    yield (
        f"work        {work(made.model_flops)} a step (causal attention half, recomputation not), "
        f"{work(made.hardware_flops)} as it is computed"
    )
    flops = getattr(made.program, "flops", None)
    if flops:
        yield (
            f"            the compiler counts {work(flops)} on a device, loops as if they "
            f"turned once"
        )
    time = made.seconds
    peak = "the rate of float32 products here" if made.target.rates is None else "peak"
    yield (
        f"time        {time.total:.3g} s a step expected if products reach {efficiency:.0%} of "
        f"{peak}: attention {time.attention:.3g}, other products {time.other:.3g}, exposed "
        f"messages of the ring {time.exposed:.3g} of {time.transfer:.3g}, sums over tensor "
        f"{time.partial:.3g}, parameters {time.parameters:.3g}"
    )
    if isinstance(made.program, Refused) and time.transfer:
        yield "            as if nothing hid the ring's messages: there is no program to tell"
    if made.minimum_block:
        enough = "hides" if made.block >= made.minimum_block else "does not hide"
        yield (
            f"ring        sending {enough} behind attention: {made.block:,} tokens a device, "
            f"c ≥ F / B = {made.minimum_block:,.0f} needed at peak"
        )


def _messages(made: Plan) -> Iterator[str]:
    for kind, found in made.collectives.items():
        started = sum(each.asynchronous for each in found)
        hidden = sum(each.hidden for each in found)
        largest = max(each.message for each in found) / 2**20
        yield (
            f"messages    {len(found)} {kind}, up to {largest:,.1f} MiB: {started} asynchronous, "
            f"{hidden} with products between start and done"
        )


def suggest(refused: Plan, request: Request, target: targets.Target) -> None:
    """Try changes until enough of them fit."""
    from agent.suggest import suggestions

    print("\nchanges, each compiled:", flush=True)
    fitting = 0
    for change, made in suggestions(refused, request.efficiency):
        total = "" if made.total is None else size(made.total)
        words = change.words(request.config, target)
        print(f"{'FITS' if made.fits else 'OOM':5}{total:>12}  {words}", flush=True)
        fitting += made.fits
        if fitting == request.suggestions:
            return


if __name__ == "__main__":
    command.run(lambda: sys.exit(main(sys.argv[1:])))
