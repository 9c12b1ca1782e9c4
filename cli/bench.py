"""`updraft bench NAME`: the benchmarks that produce the figures in the documentation."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from .shared import json_output, options, output
from .shared.command_line import CommandLine
from .shared.help_panels import ADVANCED

if TYPE_CHECKING:
    from ..bench.shared.report import Report

app = CommandLine(help="Run a benchmark, and report its figures with machine, versions and commit.")


@app.command()
def escalation(
    tasks: Annotated[int, typer.Option(min=1, max=options.MAX_TASKS, help="Number of held-out demo tasks.")] = 300,
    rounds: Annotated[int, typer.Option(min=1, help="Repetitions of each escalation, per kind of draft.")] = 3,
    seed: Annotated[int, typer.Option(help="Seed that selects the tasks.")] = 0,
    quality: options.Quality = None,
    json_path: json_output.File = None,
) -> None:
    """Measure the speed of escalations with the local answer as a draft, with no draft, and with a useless draft."""
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
    calls: Annotated[int, typer.Option(min=1, help="Number of calls to time, per kind of call.")] = 2000,
    json_path: json_output.File = None,
) -> None:
    """Measure the time that the SDK adds to a call of an openai client. A stub replaces the engine."""
    from ..bench.sdk import measure

    _show(_report("sdk", {"calls": calls}, measure(calls)), json_path)


@app.command()
def engine(
    shape: Annotated[
        str, typer.Option(help="Model: pocket, or random weights of qwen2.5-0.5b, qwen3-0.6b or llama-3.1-8b.")
    ] = "pocket",
    requests: Annotated[int, typer.Option(min=1, help="Number of queued requests.")] = 256,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Maximum requests per step.")] = 32,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="CSV to sample lengths of prompts and answers from: ContextTokens, GeneratedTokens. [built-in mix]",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed that selects the requests.")] = 0,
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="Device to measure on.")] = "cpu",
    dtype: Annotated[Literal["float32", "bfloat16"], typer.Option(help="Type of weights and KV cache.")] = "bfloat16",
    threads: Annotated[
        int | None, typer.Option(min=1, max=os.cpu_count(), help="Number of torch threads. [all cores]")
    ] = None,
    peers: Annotated[
        Literal["all", "static", "continuous", "none"],
        typer.Option(help="Batching of transformers to compare with: static, continuous (slow), all, or none."),
    ] = "all",
    only: Annotated[
        list[str] | None,
        typer.Option(
            help="Group of figures: start, throughput, sampled, decode, batches, overlap, escalation, roofline, "
            "prefill, prefix, scheduler, host, ranks, formats, steps, simulation, invariance, pocket-drafts, oracle, "
            "gaps or peers; repeatable. [all that the device supports]"
        ),
    ] = None,
    draft_shape: Annotated[
        str | None, typer.Option(help="Shape of the draft model that --only oracle runs. [pocket-small]")
    ] = None,
    json_path: json_output.File = None,
) -> None:
    """Measure throughput, decoding, prefix cache and scheduler of the cloud engine, compared with transformers.

    \b
    Examples
      updraft bench engine
      updraft bench engine --shape qwen2.5-0.5b --requests 64 --json out/engine.json
      updraft bench engine --shape qwen3-0.6b --device cuda --max-num-seqs 256 --only throughput --only gaps
    """
    import tempfile

    from ..bench.engine.measure import EngineBenchOptions, cb_settings, measure
    from ..bench.shared.workload import Workload

    max_prompt = 384 if shape == "pocket" else 512  # pocket's context holds 512 tokens, of which answers take up to 128
    workload = Workload(requests, max_prompt=max_prompt, seed=seed, trace=trace)
    config = {"shape": shape, "requests": requests, "max_num_seqs": max_num_seqs, "seed": seed}
    config |= {"trace": trace and trace.name, "draft_shape": draft_shape, "cb_settings": cb_settings(device)}
    config |= {"dtype": dtype, "device": device, "threads": threads, "peers": peers, "only": only}

    def keep(figures: dict[str, float]) -> None:
        if json_path is not None and not json_output.is_stdout(json_path):
            _report("engine", config, figures).write(json_path)

    with tempfile.TemporaryDirectory(prefix="updraft-bench-") as model_dir:
        bench_options = EngineBenchOptions(
            Path(model_dir), shape, dtype, workload, max_num_seqs, threads, device, peers, only or (), draft_shape
        )
        figures = measure(bench_options, output.note, keep)
    _show(_report("engine", config, figures), json_path)


@app.command()
def gates(
    tasks: Annotated[int, typer.Option(min=50, max=2_000, help="Number of held-out demo tasks in each draw.")] = 2_000,
    draws: Annotated[int, typer.Option(min=1, help="Number of random draws of tasks.")] = 1,
    beside: Annotated[int, typer.Option(min=0, max=64, help="Busy processes to run while decisions are timed.")] = 0,
    json_path: json_output.File = None,
) -> None:
    """Measure the packaged pair's gates: ranking, calibration error, stability under noise, and time per decision."""
    from ..bench.router.gates import measure

    figures = measure(tasks, draws, beside, output.note)
    _show(_report("gates", {"tasks": tasks, "draws": draws, "beside": beside}, figures), json_path)


@app.command()
def router(
    data: Annotated[Path, typer.Option(help="Graded prompts (.csv or .jsonl, also .gz): prompt, weak, strong.")],
    test: Annotated[Path | None, typer.Option(help="Graded prompts to score. [cross-validation on --data]")] = None,
    labels: Annotated[int | None, typer.Option(min=100, help="Number of grades to train on. [all]")] = None,
    mode: Annotated[
        Literal["prompt", "cascade"],
        typer.Option(rich_help_panel=ADVANCED, help="Decide from the prompt alone, or also from the weak answer."),
    ] = "prompt",
    seeds: Annotated[int, typer.Option(min=1, max=100, help="Number of random folds or --labels samples.")] = 5,
    weak: Annotated[str | None, typer.Option(help="Column with the weak model's score. [weak]")] = None,
    strong: Annotated[str | None, typer.Option(help="Column with the strong model's score. [strong]")] = None,
    json_path: json_output.File = None,
) -> None:
    """Measure a router that is trained on graded prompts, by RouteLLM's protocol: APGR, CPT50, CPT80, calibration.

    Also checks the guarantee. Shares are fractions of 1. Without --test, five-fold cross-validation scores the rows.

    \b
    Examples
      updraft bench router --data mmlu.csv.gz --labels 1500 --json out/mmlu.json
      updraft bench router --data train.csv --test test.csv --mode cascade
      updraft bench router --data mmlu_pro.csv.gz --weak Meta-Llama-3-8B --strong Meta-Llama-3-70B
    """
    from ..bench.router.measure import RouterBenchOptions, measure
    from ..bench.router.plot import terminal_plot
    from ..classifier.grading.graded_data import Columns
    from .shared.console import Console

    bench_options = RouterBenchOptions(data, test, labels, mode, seeds, Columns(weak, strong))
    measured = measure(bench_options, output.note)
    config = {"data": data.name, "test": test and test.name, "labels": labels, "mode": mode, "seeds": seeds}
    _show(_report("router", config | {"weak": weak, "strong": strong}, measured.metrics), json_path)
    console = Console(stderr=json_output.is_stdout(json_path))
    console.print(terminal_plot(measured.curve, measured.oracle), highlight=False, markup=False)


@app.command()
def guarantee(
    runs: Annotated[int, typer.Option(min=1, help="Number of calibrations per population and sample size.")] = 500,
    blend: Annotated[
        bool, typer.Option("--blend", help="Choose among all router models (slow), not just ridge regression.")
    ] = False,
    json_path: json_output.File = None,
) -> None:
    """Check calibrated guarantees on simulated populations of known risk: fit, calibrate, and compute the true risk.

    Takes about 20 minutes on one core. A run whose true risk exceeds the promised risk alpha is a violation; at most
    one run in ten may be a violation. The cloud share "above hindsight" is the share of needless escalations.

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
def tasks(
    runs: Annotated[int, typer.Option(min=1, help="Number of simulated streams of requests.")] = 200,
    requests: Annotated[int, typer.Option(min=1000, help="Requests of each stream.")] = 20_000,
    json_path: json_output.File = None,
) -> None:
    """Check licences of tasks on simulated requests of twelve tasks: false ones, revoked ones, and their local share.

    Takes about ten minutes on one core. A licence is false if its answers score below the quality on average.

    \b
    Examples
      updraft bench tasks --json out/tasks.json
      updraft bench tasks --runs 20
    """
    from ..bench.router.tasks import measure

    _show(_report("tasks", {"runs": runs, "requests": requests}, measure(runs, requests, output.note)), json_path)


@app.command()
def live(
    local: Annotated[
        str,
        typer.Option(
            "--local", metavar="MODEL", help="Model to measure: smollm2, a pulled model's name, or a GGUF file."
        ),
    ],
    questions: Annotated[int, typer.Option(min=200, max=300, help="Number of built-in questions.")] = 300,
    seeds: Annotated[int, typer.Option(min=1, max=100, help="Number of random splits into halves.")] = 5,
    answers: Annotated[
        Path | None,
        typer.Option(metavar="FILE", dir_okay=False, help="File that keeps the model's answers for the next run."),
    ] = None,
    json_path: json_output.File = None,
) -> None:
    """Calibrate a real local model and a stub cloud on half of 300 questions, and route the other half.

    The model answers each question once, as for calibrate --live. For each split, the router then routes the other
    half at several quality targets. Finally, the model answers one half again. AUROC: how well gates and mean
    log-probability detect wrong answers.

    \b
    Example
      updraft bench live --local smollm2 --json out/live.json
    """
    import tempfile

    from ..bench.live.questions import written_questions
    from .calibrate.live_bench import measured
    from .models.names import resolve

    sample = written_questions()[:questions]
    with tempfile.TemporaryDirectory(prefix="updraft-live-") as folder:
        figures = measured(resolve(local), sample, seeds, answers or Path(folder) / "answers.jsonl", output.note)
    config = {"local": Path(local).name, "questions": questions, "seeds": seeds}
    _show(_report("live", config, figures), json_path)


@app.command()
def local(
    model: Annotated[
        Literal["all", "pocket-small", "qwen2.5-0.5b-q8_0", "qwen2.5-0.5b-q4_k_m"],
        typer.Option(help="Model to run. The 0.5B models get random weights and are built on this machine."),
    ] = "all",
    tokens: Annotated[int, typer.Option(min=8, max=256, help="Tokens of each prompt and of each answer.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="Number of rounds; each runs every engine once.")] = 3,
    prefill_duration_s: Annotated[
        float, typer.Option(min=1, help="Time limit for measuring a 4k prefill beside decoding streams, in seconds.")
    ] = 30.0,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of every engine. [Updraft's default]")] = None,
    llama_server: Annotated[
        Path | None,
        typer.Option(metavar="PATH", exists=True, dir_okay=False, help="llama.cpp's own server, to compare with."),
    ] = None,
    model_dir: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Folder that keeps the built models for the next run. [temporary folder]"),
    ] = None,
    json_path: json_output.File = None,
) -> None:
    """Compare the on-device engine with bare llama.cpp, llama_cpp.Llama and their servers on the same model files.

    \b
    Examples
      updraft bench local
      updraft bench local --model pocket-small --llama-server build/bin/llama-server --json out/local.json
    """
    from ..bench.local.measure import MODELS, LocalBenchOptions, measure

    models = MODELS if model == "all" else (model,)
    bench_options = LocalBenchOptions(models, tokens, rounds, prefill_duration_s, threads, llama_server, model_dir)
    figures = measure(bench_options, output.note)
    config = {"models": bench_options.models, "tokens": tokens, "rounds": rounds, "threads": threads}
    config["prefill_duration_s"] = prefill_duration_s
    _show(_report("local", config, figures), json_path)


@app.command()
def gateway(
    concurrencies: Annotated[str, typer.Option(help="Numbers of requests in flight, comma-separated.")] = "1,16,64,256",
    streams: Annotated[int, typer.Option(min=1, help="Number of streams in flight.")] = 64,
    duration_s: Annotated[float, typer.Option(min=0.1, help="Duration of each measurement in seconds.")] = 5.0,
    memory_duration_s: Annotated[
        float, typer.Option(min=0, help="Duration of the memory measurement in seconds.")
    ] = 30.0,
    litellm_python: Annotated[
        Path | None,
        typer.Option(metavar="PATH", exists=True, dir_okay=False, help="Python with litellm[proxy], to compare with."),
    ] = None,
    json_path: json_output.File = None,
) -> None:
    """Compare the gateway on one core with nginx (if installed) and LiteLLM's proxy, all in front of a stub node.

    \b
    Examples
      updraft bench gateway
      updraft bench gateway --litellm-python /opt/litellm/bin/python --json out/gateway.json
    """
    from ..bench.gateway.measure import GatewayBenchOptions, measure

    try:
        counts = tuple(int(count) for count in concurrencies.split(","))
    except ValueError as error:
        raise typer.BadParameter("the value must be comma-separated numbers", param_hint="--concurrencies") from error
    bench_options = GatewayBenchOptions(counts, streams, duration_s, memory_duration_s, litellm_python)
    config = {
        "concurrencies": counts,
        "streams": streams,
        "duration_s": duration_s,
        "memory_duration_s": memory_duration_s,
    }
    _show(_report("gateway", config, measure(bench_options, output.note)), json_path)


@app.command()
def kernels(
    short: Annotated[
        bool, typer.Option("--short", help="Measure one or two shapes per kernel, with fewer repetitions.")
    ] = False,
    json_path: json_output.File = None,
) -> None:
    """Time each kernel on a CUDA device, and compare with the device's memory and compute limits and other libraries.

    \b
    Example
      updraft bench kernels --short
    """
    from ..bench.kernels.cases import cases
    from ..bench.kernels.measure import GpuClock, Measurements, measure, report_of, require_cuda
    from .shared.console import Console
    from .shared.tables import kernels_table

    device = require_cuda()
    repetitions = 30 if short else 100
    clock = GpuClock(repetitions)

    def figures(measured: Measurements) -> dict[str, Any]:
        return report_of(device, {"short": short, "repetitions": repetitions}, measured)

    def keep(measured: Measurements) -> None:
        if not json_output.is_stdout(json_path):
            json_output.write(json_path, figures(measured))

    measured = measure(cases(short=short), clock, output.note, keep)
    Console(stderr=json_output.is_stdout(json_path)).print(kernels_table(measured.rows, device))
    if json_output.is_stdout(json_path):
        json_output.show(figures(measured))


@app.command()
def affinity(
    trace: Annotated[Path, typer.Option(help="Requests in Mooncake's JSON Lines.", exists=True, dir_okay=False)],
    nodes: Annotated[int, typer.Option(min=1, help="Number of simulated nodes.")] = 4,
    requests: Annotated[int, typer.Option(min=1, help="Number of requests to use from the trace.")] = 100_000,
    seed: Annotated[int, typer.Option(help="Seed for the choice between equally good nodes.")] = 0,
    workers: Annotated[int, typer.Option(min=1, help="Number of gateway workers.")] = 1,
    json_path: json_output.File = None,
) -> None:
    """Measure the prefix cache hits that the gateway's choice of nodes achieves, compared with one shared cache.

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
    """Print a report as a table, and write it to the file that --json names."""
    from rich.markup import escape

    from .shared.console import Console
    from .shared.tables import columns

    title = f"{report.config['bench']} at {report.commit} on {report.machine['cpu']}"
    table = columns("metric", "value", right=("value",), title=title, fold=True)
    for name, value in report.metrics.items():
        table.add_row(escape(name), f"{value:,.6g}")
    Console(stderr=json_output.is_stdout(path)).print(table)
    json_output.write(path, report.fields())
