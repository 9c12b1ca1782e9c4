"""Help in panels: `--help` shows a command's usual options, `--help-all` shows every option."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import typer

from . import output

Function = TypeVar("Function", bound=Callable[..., Any])

ADVANCED = "Advanced"
#: Options of each panel. `--help` shows the panels in this order, after a panel "Options" with all other options.
_PANELS = {
    "Model": "--local --model --draft --device --dtype --chat-template --tool-parser --tool-call-parser",
    "Cloud": "--cloud-url --cloud-model --cloud-provider --node --nodes-file --register --register-api-key-file "
    "--register-as --prices",
    "Target": "--quality --cloud-share --cost --promise --promise-level --confidence --confidence-signal "
    "--slo-ttft-s --slo-tpot-s",
    "Network": "--host --port --api-key-env --api-key-file --app-api-key-env --app-api-key-file --keys --no-auth "
    "--allowed-host --allowed-origin --tls-cert --tls-key --insecure --public-metrics",
    "Limits": "--mode --step-costs --max-model-len --max-num-seqs --max-num-batched-tokens --max-step-ms "
    "--default-max-tokens --max-waiting --num-gpu-blocks-override --num-speculative-tokens --node-concurrency "
    "--limits --limits-url --timeout-s --connect-timeout-s --first-token-timeout-s --idle-timeout-s "
    "--hedge-after-s --drain-seconds",
    ADVANCED: "--config --db --ledger-failure --keep-days --response-cache --workers --threads --block-size "
    "--scheduling-policy --enable-prefix-caching --ngram --batch-invariant --attention-backend --enforce-eager "
    "--restart --log-format --log-file --ready-file --exit-with-parent --help-all",
}


def shows(*options: str) -> Callable[[Function], Function]:
    """Return a decorator for a command: `--help` shows only these options, in panels."""

    def marked(command: Function) -> Function:
        vars(command)["shown_options"] = frozenset((*options, "--help-all"))
        return command

    return marked


def shown_options(command: Any) -> frozenset[str] | None:
    """Return the options that `shows` named; None if `--help` shows all options."""
    return getattr(command, "shown_options", None)


def _show_all(context: typer.Context, requested: bool) -> None:
    if requested:
        command = copy.copy(context.command)
        command.params = [copy.copy(param) for param in command.params]
        for param in command.params:
            vars(param)["hidden"] = False
        output.echo(command.get_help(context))
        raise typer.Exit


HelpAll = Annotated[
    bool, typer.Option("--help-all", is_eager=True, callback=_show_all, help="Show every option and exit.")
]


def arrange(params: list[Any], shown: frozenset[str]) -> None:
    """Sort options by panel, and hide the options that are not `shown`."""
    panels = {name: panel for panel, names in _PANELS.items() for name in names.split()}
    order = [None, *_PANELS]
    for param in params:
        if param.param_type_name == "option":
            param.hidden = shown.isdisjoint(param.opts)
            param.rich_help_panel = param.rich_help_panel or panels.get(param.opts[0])
    params.sort(key=lambda param: order.index(getattr(param, "rich_help_panel", None)))
