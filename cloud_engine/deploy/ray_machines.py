"""A node of several machines on Ray: the replica has machine 0, and an actor in its placement group each other one."""

# pyright: reportMissingImports=false
from __future__ import annotations

import secrets
import socket
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ..engine.ranks.meeting import KEY_VARIABLE
from ..node.process import NodeOptions
from .config import ModelDeployment
from .servers import ServerProcess


@dataclass(frozen=True)
class NodeGroup:
    """The options and environment of machine 0, and the actors that run the other machines' ranks."""

    options: NodeOptions
    environment: dict[str, str] = field(default_factory=dict[str, str], repr=False)
    actors: list[Any] = field(default_factory=list[Any])


class RankMachine:
    """Runs the ranks of one machine, which end with this actor."""

    def __init__(self, options: NodeOptions, environment: dict[str, str]) -> None:
        self._process = ServerProcess(options, 0.0, **environment)


def start_group(options: NodeOptions, model: ModelDeployment) -> NodeGroup:
    """Start the other machines' ranks in this replica's placement group. They end when the actors are forgotten."""
    address: str = ray.util.get_node_ip_address()
    machines, key = model.machines, {KEY_VARIABLE: secrets.token_hex(32)}
    engine = replace(options.engine, nnodes=machines, master_addr=address, master_port=_port(address))
    group: Any = ray.util.get_current_placement_group()
    actors: list[Any] = []
    for number in range(1, machines):
        actor: Any = ray.remote(RankMachine).options(
            num_cpus=model.cpus,
            num_gpus=model.devices // machines,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number),
        )
        # Their ranks start again with machine 0's engine.
        actors.append(actor.remote(replace(options, engine=replace(engine, node_rank=number), restart=True), key))
    return NodeGroup(replace(options, engine=engine), key, actors)


def _port(address: str) -> int:
    """Return the first of two free ports of this machine."""
    while True:
        with socket.create_server((address, 0)) as first:
            port: int = first.getsockname()[1]
            try:
                with socket.create_server((address, port + 1)):
                    return port
            except OSError:
                continue
