"""`updraft cloud up|down|llm-config`: runs a gateway and its nodes from one file."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..protocol.errors import ConfigurationError
from .shared import json_output, output
from .shared.command_line import CommandLine

if TYPE_CHECKING:
    from ..cloud_engine.deploy import CloudConfig

app = CommandLine(help="Run a gateway and its nodes from one YAML file, as local processes or on a Ray cluster.")


@app.command()
def up(
    file: Annotated[Path, typer.Argument(metavar="YAML", help="File that describes the gateway and the models.")],
    as_processes: Annotated[
        bool, typer.Option("--processes", help="Run processes on this machine, and restart those that die.")
    ] = False,
    on_ray: Annotated[bool, typer.Option("--ray", help="Run on Ray Serve, which also scales the models.")] = False,
    address: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS", help="Address of a Ray cluster; auto: on this machine. [a new cluster, until Ctrl-C]"
        ),
    ] = None,
) -> None:
    """Start a cloud, or update a cloud that runs on a Ray cluster, replica by replica.

    Prints `ready URL` once every model has its nodes. `updraft keys` manages the API keys.

    \b
    Examples
      updraft cloud up cloud.yaml --processes
      updraft cloud up --ray cloud.yaml
      updraft cloud up --ray cloud.yaml --address auto     update it from another terminal
    """
    from ..cloud_engine.deploy import read_config
    from ..cloud_engine.deploy.local import run_local
    from ..cloud_engine.deploy.ray_cluster import run_on_ray
    from ..cloud_engine.deploy.ray_llm import foreign_models
    from .shared.processes import signals_as_interrupts

    if as_processes == on_ray or (as_processes and address is not None):
        raise ConfigurationError("Give --processes, or --ray with or without --address.", param="processes")
    config = _with_pocket(read_config(file))
    for model in foreign_models(config):
        output.echo(
            f"{model.name} runs on {model.kind}: deploy it with the output of `updraft cloud llm-config`, and add its "
            "address to gateway.nodes_file.",
            err=True,
        )
    with signals_as_interrupts():
        if as_processes:
            run_local(file, lambda: _with_pocket(read_config(file)), _ready)
        else:
            run_on_ray(config, address, _ready)


@app.command()
def down(address: Annotated[str, typer.Option(metavar="ADDRESS", help="Address of the Ray cluster.")] = "auto") -> None:
    """Stop the cloud on a Ray cluster after its requests have finished."""
    from ..cloud_engine.deploy.ray_cluster import remove_from_ray

    remove_from_ray(address)


@app.command("llm-config")
def llm_config(
    file: Annotated[Path, typer.Argument(metavar="YAML", help="Cloud file with models of kind vllm or sglang.")],
) -> None:
    """Print the configuration with which Ray's `serve deploy` runs vLLM and SGLang models.

    \b
    Example
      updraft cloud llm-config cloud.yaml > llm.json && serve deploy llm.json
    """
    from ..cloud_engine.deploy import read_config
    from ..cloud_engine.deploy.ray_llm import serve_config

    json_output.show(serve_config(read_config(file)))


def _with_pocket(config: CloudConfig) -> CloudConfig:
    """Replace the model name `pocket` with the folders of the packaged models, because the engine takes folders."""
    import msgspec

    from ..embedded import pocket

    large, small = str(pocket.pocket_large_folder()), str(pocket.pocket_small_folder())
    models = tuple(
        msgspec.structs.replace(
            model,
            model=large if model.model == "pocket" else model.model,
            draft=small if model.draft == "pocket" else model.draft,
        )
        for model in config.models
    )
    return msgspec.structs.replace(config, models=models)


def _ready(url: str) -> None:
    with suppress(OSError):  # as in `serve`
        output.echo(f"ready {url}")
