"""`updraft cloud up|down|llm-config`: a gateway and its nodes from one file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...protocol.errors import ConfigurationError
from ..shared import json_output, output
from ..shared.command_line import CommandLine

if TYPE_CHECKING:
    from ...cloud_engine.deploy import CloudConfig

app = CommandLine(help="A gateway and its nodes from one YAML file: plain processes of this machine, or a Ray cluster.")


@app.command()
def up(
    file: Annotated[Path, typer.Argument(metavar="YAML", help="The cloud: its gateway and its models.")],
    local: Annotated[bool, typer.Option("--local", help="Plain processes; what dies is started anew.")] = False,
    on_ray: Annotated[bool, typer.Option("--ray", help="Ray Serve, which also scales.")] = False,
    address: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS", help="A running Ray cluster; auto finds this machine's. [a new one, till Ctrl-C]"
        ),
    ] = None,
) -> None:
    """Start a cloud, or update the one that runs on a Ray cluster, replica by replica.

    It prints `ready URL` once every model has its nodes. Keys are those of `updraft keys`.

    \b
    Examples
      updraft cloud up cloud.yaml --local
      updraft cloud up --ray cloud.yaml
      updraft cloud up --ray cloud.yaml --address auto     from another terminal: the update
    """
    from ...cloud_engine.deploy import read_config
    from ...cloud_engine.deploy.foreign import foreign_models
    from ...cloud_engine.deploy.local import run_local
    from ...cloud_engine.deploy.ray_cluster import run_on_ray
    from ..shared.processes import signals_as_interrupts

    if local == on_ray or (local and address is not None):
        raise ConfigurationError("Give --local, or --ray with or without --address.", param="local")
    config = _with_pocket(read_config(file))
    for model in foreign_models(config):
        output.echo(
            f"{model.name} runs on {model.kind}: deploy it as `updraft cloud llm-config` says, and name its address in "
            "gateway.nodes_file.",
            err=True,
        )
    with signals_as_interrupts():
        if local:
            run_local(file, lambda: _with_pocket(read_config(file)), _ready)
        else:
            run_on_ray(config, address, _ready)


@app.command()
def down(address: Annotated[str, typer.Option(metavar="ADDRESS", help="The Ray cluster.")] = "auto") -> None:
    """Stop the cloud of a Ray cluster, when its requests are finished.

    \b
    Example
      updraft cloud down
    """
    from ...cloud_engine.deploy.ray_cluster import remove_from_ray

    remove_from_ray(address)


@app.command("llm-config")
def llm_config(
    file: Annotated[Path, typer.Argument(metavar="YAML", help="The cloud, with models of the kind vllm or sglang.")],
) -> None:
    """Write the configuration by which Ray's own `serve deploy` runs the models of vLLM and SGLang.

    \b
    Example
      updraft cloud llm-config cloud.yaml > llm.json && serve deploy llm.json
    """
    from ...cloud_engine.deploy import read_config
    from ...cloud_engine.deploy.foreign import serve_config

    json_output.show(serve_config(read_config(file)))


def _with_pocket(config: CloudConfig) -> CloudConfig:
    """The packaged models' names as folders: what runs the cloud does not know of them."""
    import msgspec

    from ...embedded import pocket

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
    output.echo(f"ready {url}")
