"""Help in panels: `--help` shows a command's usual options, `--help-all` shows every option."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import typer

from . import output

Function = TypeVar("Function", bound=Callable[..., Any])

ADVANCED = "Advanced"
#: Options by panel, in the order of `--help`. Options that are not listed here belong to the panel `ADVANCED`.
_PANELS = {
    "Model": "--tier --temperature --local --model --pull --name --sha256 --draft --device --dtype --quantization "
    "--chat-template --tool-call-parser --shape --draft-shape --model-dir",
    "Cloud": "--cloud-url --cloud-model --cloud-provider --node --nodes-file --register --register-api-key-env "
    "--register-api-key-file --register-as --prices --usd-per-hour --judge --judge-url --judge-api-key-env "
    "--judge-api-key-file --processes --ray --address",
    "Target": "--quality --cloud-share --cost --promise --promise-level --confidence --confidence-signal "
    "--slo-ttft-s --slo-tpot-s --ttft-s --tpot-s --share --data --live --prompts --from-log --weak --strong --test "
    "--labels --tasks --file --questions --trace --requests --rate",
    "Network": "--host --port --api-key-env --api-key-file --client-api-key-env --client-api-key-file --no-auth --keys "
    "--allowed-hosts --allowed-origins --ssl-certfile --ssl-keyfile --insecure --public-metrics",
    "Limits": "--mode --step-costs --max-model-len --max-num-seqs --max-num-batched-tokens --max-step-ms "
    "--default-max-tokens --max-waiting --num-gpu-blocks-override --num-speculative-tokens "
    "--max-concurrency-per-node --limits --limits-url --timeout-s --connect-timeout-s --first-token-timeout-s "
    "--idle-timeout-s --hedge-after-s --drain-timeout-s --budget --max-concurrency --requests-per-minute "
    "--tokens-per-minute --usd-per-day --usd-per-month --priority --concurrencies --streams --duration-s "
    "--memory-duration-s --prefill-duration-s --rounds --runs --draws --calls --tokens --nodes --scope "
    "--expires-in-days --overlap-s",
    ADVANCED: "",
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


def arrange(params: list[Any], shown: frozenset[str] | None) -> None:
    """Sort options by panel, and hide the options that are not `shown`; None shows all options."""
    panels = {name: panel for panel, names in _PANELS.items() for name in names.split()}
    order = [None, *_PANELS]
    for param in params:
        if param.param_type_name == "option":
            param.hidden = param.hidden or (shown is not None and shown.isdisjoint(param.opts))
            param.rich_help_panel = param.rich_help_panel or panels.get(param.opts[0], ADVANCED)
    params.sort(key=lambda param: order.index(getattr(param, "rich_help_panel", None)))
