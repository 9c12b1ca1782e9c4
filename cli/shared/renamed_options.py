"""Former names of options. A command called with a former name fails and names the current option."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import takewhile
from types import MappingProxyType

from ...protocol.errors import ConfigurationError

#: Current name by former name. An entry applies to commands that have the current option but not the former option.
RENAMED = MappingProxyType({
    "--cloud": "--cloud-url", "--cloud-key-env": "--api-key-env", "--confidence": "--promise-level",
    "--key-env": "--client-api-key-env --api-key-env", "--key-file": "--api-key-file --client-api-key-file",
    "--app-api-key-env": "--client-api-key-env", "--app-api-key-file": "--client-api-key-file",
    "--api-key-env": "--client-api-key-env", "--api-key-file": "--client-api-key-file",
    "--node-api-key-file": "--api-key-file", "--judge-key-env": "--judge-api-key-env",
    "--register-key-file": "--register-api-key-file", "--max-batch-size": "--max-num-seqs",
    "--token-budget": "--max-num-batched-tokens", "--context-length": "--max-model-len",
    "--num-blocks": "--num-gpu-blocks-override", "--num-draft-tokens": "--num-speculative-tokens",
    "--prefix-caching": "--enable-prefix-caching", "--no-prefix-caching": "--no-enable-prefix-caching",
    "--policy": "--scheduling-policy", "--tool-parser": "--tool-call-parser",
    "--tls-cert": "--ssl-certfile", "--tls-key": "--ssl-keyfile", "--allowed-origin": "--allowed-origins",
    "--allowed-host": "--allowed-hosts", "--running": "--max-num-seqs",
    "--local": "--processes", "--drain-seconds": "--drain-timeout-s", "--db": "--ledger",
    "--costs": "--step-costs", "--node-concurrency": "--max-concurrency-per-node",
    "--concurrent": "--max-concurrency", "--concurrency": "--max-concurrency", "--seconds": "--duration-s",
    "--memory-seconds": "--memory-duration-s", "--prefill-seconds": "--prefill-duration-s",
    "--cuda-graphs": "--no-enforce-eager", "--no-cuda-graphs": "--enforce-eager",
})  # fmt: skip


def current_name(former: str, options: Collection[str]) -> str | None:
    """Return the option that replaces `former` in a command with these `options`; None if nothing replaces it."""
    names = "" if former in options else RENAMED.get(former, "")
    return next((name for name in names.split() if name in options), None)


def check_renamed(arguments: Iterable[str], options: Collection[str]) -> None:
    """Raise ConfigurationError if a former name is among the arguments of a command with these `options`."""
    before = ""
    for argument in takewhile(lambda word: word != "--", arguments):
        for value in ("confidence", "level"):
            if argument == f"--promise={value}" or (before, argument) == ("--promise", value):
                raise ConfigurationError(f"`--promise {value}` is now `--promise no-loss`.", param="--promise")
        former = before = argument.partition("=")[0]
        if (name := current_name(former, options)) is not None:
            raise ConfigurationError(f"`{former}` is now `{name}`.", param=former)
