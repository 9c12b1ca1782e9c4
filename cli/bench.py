"""`updraft bench NAME`: the commands behind the figures in the documentation."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from .shared import json_output, options, output
from .shared.command_line import CommandLine

if TYPE_CHECKING:
    from ..bench.shared.report import Report

app = CommandLine(help="Measure, and print or write the figures with machine, versions and commit.")


@app.command()
def escalation(
    tasks: Annotated[int, typer.Option(min=1, max=options.MAX_TASKS, help="Held-out pocket tasks.")] = 300,
    rounds: Annotated[int, typer.Option(min=1, help="How often each escalation is asked in each way.")] = 3,
    seed: Annotated[int, typer.Option(help="Which of the held-out tasks.")] = 0,
    quality: options.Quality = None,
    json_path: json_output.File = None,
) -> None:
    """Measure the local answer as a draft: escalations with it, without it, and with a useless one.

    \b
    Example
      updraft bench escalation --tasks 300 --json out/escalation.json
    """
    import asyncio

    from ..bench.cascade.escalation import measure
    from ..bench.cascade.questions import pocket_questions

    config = options.Pair(local="pocket", quality=quality).config()
    with options.with_cloud(config, output.note, nodes=1) as running:
        figures = asyncio.run(measure(running, pocket_questions(tasks, seed), rounds, output.note))
    settings = {"tasks": tasks, "rounds": rounds, "seed": seed, "quality": config.quality}
    _show(_report("escalation", settings, figures), json_path)


@app.command()
def sdk(
    calls: Annotated[int, typer.Option(min=1, help="Calls of each kind.")] = 2000,
    json_path: json_output.File = None,
) -> None:
    """What the SDK adds to a call of the openai client, with a stub engine: against an instant transport, in turn.

    \b
    Example
      updraft bench sdk --json out/sdk.json
    """
    from ..bench.sdk import measure

    _show(_report("sdk", {"calls": calls}, measure(calls)), json_path)


@app.command()
def engine(
    shape: Annotated[
        str, typer.Option(help="pocket, or random weights of a real shape: qwen2.5-0.5b, qwen3-0.6b, llama-3.1-8b.")
    ] = "pocket",
    requests: Annotated[int, typer.Option(min=1, help="Queued requests.")] = 256,
    running: Annotated[int, typer.Option(min=1, help="Requests that run at a time, at most.")] = 32,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="CSV with ContextTokens and GeneratedTokens to draw lengths from. [built-in mix]",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Which requests are drawn.")] = 0,
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="Where to measure.")] = "cpu",
    dtype: Annotated[Literal["float32", "bfloat16"], typer.Option(help="Of weights and KV cache.")] = "bfloat16",
    threads: Annotated[
        int | None, typer.Option(min=1, max=os.cpu_count(), help="Threads of torch. [all cores]")
    ] = None,
    peers: Annotated[
        Literal["all", "static", "continuous", "none"],
        typer.Option(help="transformers on the same requests: static batches, continuous batching (slow), or both."),
    ] = "all",
    only: Annotated[
        list[str] | None,
        typer.Option(
            help="start, throughput, sampled, decode, prefill, prefix, scheduler, steps, simulation, invariance, "
            "pocket-drafts, oracle, gaps (CUDA only) or peers; may be said several times. [all that the device has]"
        ),
    ] = None,
    draft_shape: Annotated[
        str | None, typer.Option(help="Shape of the model that an oracle's drafts take the time of. [pocket]")
    ] = None,
    json_path: json_output.File = None,
) -> None:
    """Throughput, decoding, prefix cache and scheduler of the cloud engine, beside transformers on the same requests.

    \b
    Examples
      updraft bench engine
      updraft bench engine --shape qwen2.5-0.5b --requests 64 --json out/engine.json
      updraft bench engine --shape qwen3-0.6b --device cuda --running 256 --only throughput --only gaps
    """
    import tempfile

    from ..bench.engine.measure import Setting, cb_settings, measure
    from ..bench.shared.workload import Workload

    max_prompt = 384 if shape == "pocket" else 512  # with 128 tokens of output, what its context holds
    workload = Workload(requests, max_prompt=max_prompt, seed=seed, trace=trace)
    config = {"shape": shape, "requests": requests, "running": running, "trace": trace and trace.name, "seed": seed}
    config |= {"dtype": dtype, "device": device, "threads": threads, "peers": peers, "only": only}
    config |= {"draft_shape": draft_shape, "cb_settings": cb_settings(device)}

    def keep(figures: dict[str, float]) -> None:
        if json_path is not None and not json_output.is_stdout(json_path):
            _report("engine", config, figures).write(json_path)

    with tempfile.TemporaryDirectory(prefix="updraft-bench-") as model_dir:
        setting = Setting(
            Path(model_dir), shape, dtype, workload, running, threads, device, peers, only or (), draft_shape
        )
        figures = measure(setting, output.note, keep)
    _show(_report("engine", config, figures), json_path)


@app.command()
def gates(
    tasks: Annotated[int, typer.Option(min=50, max=2_000, help="Held-out pocket tasks in a draw.")] = 2_000,
    draws: Annotated[int, typer.Option(min=1, help="How often as many are drawn.")] = 1,
    beside: Annotated[int, typer.Option(min=0, max=64, help="Busy processes while decisions are timed.")] = 0,
    json_path: json_output.File = None,
) -> None:
    """The packaged pair's gates: ranking, calibration error, what noise leaves of decisions, and how long one takes.

    \b
    Example
      updraft bench gates --draws 4 --json out/gates.json
    """
    from ..bench.router.gates import measure

    figures = measure(tasks, draws, beside, output.note)
    _show(_report("gates", {"tasks": tasks, "draws": draws, "beside": beside}, figures), json_path)


@app.command()
def router(
    data: Annotated[Path, typer.Option(help="Graded prompts, .csv or .jsonl (.gz): prompt, weak, strong.")],
    test: Annotated[Path | None, typer.Option(help="Score these rows instead of cross-validating.")] = None,
    labels: Annotated[int | None, typer.Option(min=100, help="Grades drawn per seed. [all]")] = None,
    mode: Annotated[
        Literal["prompt", "cascade"], typer.Option(help="Decide by the prompt, or also by the weak answer.")
    ] = "prompt",
    seeds: Annotated[int, typer.Option(min=1, max=100, help="Foldings, or drawings of labels.")] = 5,
    weak: Annotated[str | None, typer.Option(help="Column of the weak model's score. [weak]")] = None,
    strong: Annotated[str | None, typer.Option(help="Column of the strong model's score. [strong]")] = None,
    json_path: json_output.File = None,
) -> None:
    """A router learned from graded prompts, by RouteLLM's protocol: APGR, CPT50, CPT80, calibration, guarantee.

    Shares and CPTs are fractions of 1. Without --test: five-fold cross-validation.

    \b
    Examples
      updraft bench router --data mmlu.csv.gz --labels 1500 --json out/mmlu.json
      updraft bench router --data train.csv --test test.csv --mode cascade
      updraft bench router --data mmlu_pro.csv.gz --weak Meta-Llama-3-8B --strong Meta-Llama-3-70B
    """
    from ..bench.router.measure import Setting, measure
    from ..bench.router.plot import terminal_plot
    from ..classifier.grading.graded_data import Columns
    from .shared.console import Console

    setting = Setting(data, test, labels, mode, seeds, Columns(weak, strong))
    measured = measure(setting, output.note)
    config = {"data": data.name, "test": test and test.name, "labels": labels, "mode": mode, "seeds": seeds}
    _show(_report("router", config | {"weak": weak, "strong": strong}, measured.metrics), json_path)
    console = Console(stderr=json_output.is_stdout(json_path))
    console.print(terminal_plot(measured.curve, measured.oracle), highlight=False, markup=False)


@app.command()
def guarantee(
    runs: Annotated[int, typer.Option(min=1, help="Calibrations of each population and number of rows.")] = 500,
    blend: Annotated[
        bool, typer.Option("--blend", help="Choose among the models that ship (slow), not the ridge alone.")
    ] = False,
    json_path: json_output.File = None,
) -> None:
    """Fit, calibrate, ship, and then the true risk, on simulated populations whose risk is known.

    About 20 minutes of one core. A violation is a true risk above alpha; at most one run in ten may show one. The
    cloud share "above hindsight" is what the same gates would not have had to escalate.

    \b
    Examples
      updraft bench guarantee --json out/guarantee.json
      updraft bench guarantee --blend --runs 20
    """
    from ..bench.router.guarantee import Procedure, measure
    from ..classifier.training.router_model import MEMBERS

    procedure = Procedure(members=MEMBERS) if blend else Procedure()
    figures = measure(runs, output.note, procedure)
    _show(_report("guarantee", {"runs": runs, "blend": blend}, figures), json_path)


@app.command()
def live(
    local: Annotated[str, typer.Option("--local", metavar="MODEL", help="GGUF file or pulled model to measure.")],
    questions: Annotated[int, typer.Option(min=200, max=300, help="How many of the written ones, mixed.")] = 300,
    seeds: Annotated[int, typer.Option(min=1, max=100, help="How often they are halved anew.")] = 5,
    answers: Annotated[
        Path | None,
        typer.Option(metavar="FILE", dir_okay=False, help="Keep the model's answers here, for the next run."),
    ] = None,
    json_path: json_output.File = None,
) -> None:
    """A real local model, and a cloud that knows the answers: calibrated on half of 300 questions, routed on the rest.

    The model answers once, as for calibrate --live. Each half is routed by the real router at several qualities; of the
    first half the model also answers live. AUROC is of the gates and of the mean log-probability, for "is wrong".

    \b
    Example
      updraft bench live --local smollm2.gguf --json out/live.json
    """
    import tempfile

    from ..bench.live.written import written_questions
    from .calibrate.written import measured

    asked = written_questions()[:questions]
    with tempfile.TemporaryDirectory(prefix="updraft-live-") as folder:
        figures = measured(local, asked, seeds, answers or Path(folder) / "answers.jsonl", output.note)
    config = {"local": Path(local).name, "questions": questions, "seeds": seeds}
    _show(_report("live", config, figures), json_path)


@app.command()
def local(
    model: Annotated[
        Literal["all", "pocket-small", "qwen2.5-0.5b-q8_0", "qwen2.5-0.5b-q4_k_m"],
        typer.Option(help="What to run. The 0.5B ones have random weights, and are built here."),
    ] = "all",
    tokens: Annotated[int, typer.Option(min=8, max=256, help="Of an answer, and of the prompt before it.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="In each, all engines take their turn.")] = 3,
    prefill_seconds: Annotated[
        float, typer.Option(min=1, help="How long at most a 4k prompt is watched while others read.")
    ] = 30.0,
    threads: Annotated[int | None, typer.Option(min=1, help="Of all engines. [as ours chooses]")] = None,
    llama_server: Annotated[
        Path | None,
        typer.Option(metavar="PATH", exists=True, dir_okay=False, help="llama.cpp's own server, to compare with too."),
    ] = None,
    model_dir: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Keep the built models here for the next run. [a temporary folder]"),
    ] = None,
    json_path: json_output.File = None,
) -> None:
    """The on-device engine beside bare llama.cpp, llama_cpp.Llama and the servers over them, on the same files.

    \b
    Examples
      updraft bench local
      updraft bench local --model pocket-small --llama-server build/bin/llama-server --json out/local.json
    """
    from ..bench.local.measure import MODELS, Setting, measure

    models = MODELS if model == "all" else (model,)
    setting = Setting(models, tokens, rounds, prefill_seconds, threads, llama_server, model_dir)
    figures = measure(setting, output.note)
    config = {"models": setting.models, "tokens": tokens, "rounds": rounds, "threads": threads}
    config["prefill_seconds"] = prefill_seconds
    _show(_report("local", config, figures), json_path)


@app.command()
def gateway(
    concurrencies: Annotated[str, typer.Option(help="Requests in flight, one figure after the other.")] = "1,16,64,256",
    streams: Annotated[int, typer.Option(min=1, help="Streams in flight.")] = 64,
    seconds: Annotated[float, typer.Option(min=0.1, help="Of each measurement.")] = 5.0,
    memory_seconds: Annotated[float, typer.Option(min=0, help="Of load during which memory is watched.")] = 30.0,
    litellm_python: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH", exists=True, dir_okay=False, help="A Python with litellm[proxy], to compare with."
        ),
    ] = None,
    json_path: json_output.File = None,
) -> None:
    """The gateway on one core in front of a stub, beside nginx (where installed) and LiteLLM's proxy in one run.

    \b
    Examples
      updraft bench gateway
      updraft bench gateway --litellm-python /opt/litellm/bin/python --json out/gateway.json
    """
    from ..bench.gateway.measure import Setting, measure

    try:
        counts = tuple(int(count) for count in concurrencies.split(","))
    except ValueError as error:
        raise typer.BadParameter("must be numbers with commas between them", param_hint="--concurrencies") from error
    setting = Setting(counts, streams, seconds, memory_seconds, litellm_python)
    config = {"concurrencies": counts, "streams": streams, "seconds": seconds, "memory_seconds": memory_seconds}
    _show(_report("gateway", config, measure(setting, output.note)), json_path)


@app.command()
def kernels(
    short: Annotated[
        bool, typer.Option("--short", help="One or two shapes of each kernel, fewer repetitions.")
    ] = False,
    json_path: json_output.File = None,
) -> None:
    """Each kernel's time on a CUDA device beside what its memory and tensor cores allow, and beside other libraries.

    \b
    Examples
      updraft bench kernels --short
      updraft bench kernels --json out/kernels.json
    """
    from ..bench.kernels.cases import cases
    from ..bench.kernels.measure import GpuClock, Measured, measure, report_of, require_cuda
    from .shared.console import Console
    from .shared.tables import kernels_table

    device = require_cuda()
    repetitions = 30 if short else 100
    clock = GpuClock(repetitions)

    def figures(measured: Measured) -> dict[str, Any]:
        return report_of(device, {"short": short, "repetitions": repetitions}, measured)

    def keep(measured: Measured) -> None:
        if not json_output.is_stdout(json_path):
            json_output.write(json_path, figures(measured))

    measured = measure(cases(short=short), clock, output.note, keep)
    Console(stderr=json_output.is_stdout(json_path)).print(kernels_table(measured.rows, device))
    if json_output.is_stdout(json_path):
        json_output.show(figures(measured))


@app.command()
def affinity(
    trace: Annotated[Path, typer.Option(help="JSON lines in Mooncake's form.", exists=True, dir_okay=False)],
    nodes: Annotated[int, typer.Option(min=1, help="Simulated nodes.")] = 4,
    requests: Annotated[int, typer.Option(min=1, help="The first of the trace.")] = 100_000,
    seed: Annotated[int, typer.Option(help="Of the choice between equal nodes.")] = 0,
    workers: Annotated[int, typer.Option(min=1, help="Of the gateway.")] = 1,
    json_path: json_output.File = None,
) -> None:
    """How many cached blocks the gateway's choice of nodes finds, against one cache for all.

    \b
    Example
      updraft bench affinity --trace conversation_trace.jsonl --nodes 4
    """
    from ..bench.gateway.affinity import read_trace, replay

    figures = replay(read_trace(trace, requests), nodes, seed, workers)
    settings = {"trace": trace.name, "nodes": nodes, "requests": requests, "seed": seed, "workers": workers}
    _show(_report("affinity", settings, figures), json_path)


def _report(bench: str, config: Mapping[str, Any], figures: Mapping[str, Any]) -> Report:
    from ..bench.shared.report import Report

    return Report.of({"bench": bench, **config}, figures)


def _show(report: Report, path: Path | None) -> None:
    """Print a report as a table, and write it if asked."""
    from rich.markup import escape

    from .shared.console import Console
    from .shared.tables import columns

    title = f"{report.config['bench']} at {report.commit} on {report.machine['cpu']}"
    table = columns("metric", "value", right=("value",), title=title, fold=True)
    for name, value in report.metrics.items():
        table.add_row(escape(name), f"{value:,.6g}")
    Console(stderr=json_output.is_stdout(path)).print(table)
    json_output.write(path, report.fields())
