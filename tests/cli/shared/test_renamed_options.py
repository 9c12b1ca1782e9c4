"""A former name of an option is refused with the current one."""

from __future__ import annotations

from typing import Any

import pytest
import typer
from updraft.cli.main import app
from updraft.cli.shared.renamed_options import RENAMED, check_renamed
from updraft.protocol.errors import ConfigurationError


def options_of(command: Any) -> list[set[str]]:
    own = {name for param in command.params for name in (*param.opts, *param.secondary_opts)}
    return [own, *(names for each in getattr(command, "commands", {}).values() for names in options_of(each))]


@pytest.mark.parametrize("former", RENAMED)
def test_the_current_name_is_an_option(former: str) -> None:
    of_commands = options_of(typer.main.get_command(app))
    for name in RENAMED[former].split():
        assert any(name in own and former not in own for own in of_commands)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (("ask", "hi", "--cloud", "https://h/v1"), "--cloud-url"),
        (("chat", "--cloud-key-env", "KEY"), "--api-key-env"),
        (("serve", "--key-env", "KEY"), "--client-api-key-env"),
        (("top", "--key-env=KEY"), "--api-key-env"),
        (("serve", "--app-api-key-file", "key"), "--client-api-key-file"),
        (("node", "--model", "pocket", "--api-key-file", "key"), "--client-api-key-file"),
        (("serve", "--tool-parser", "hermes"), "--tool-call-parser"),
        (("init", "--key-file", "key"), "--api-key-file"),
        (("gateway", "--node-api-key-file", "key"), "--api-key-file"),
        (("node", "--model", "pocket", "--max-batch-size", "4"), "--max-num-seqs"),
        (("node", "--no-prefix-caching"), "--no-enable-prefix-caching"),
        (("plan", "--num-blocks", "4"), "--num-gpu-blocks-override"),
        (("node", "--tls-cert", "c.pem"), "--ssl-certfile"),
        (("serve", "--tls-key=k.pem"), "--ssl-keyfile"),
        (("gateway", "--allowed-origin", "http://a"), "--allowed-origins"),
        (("serve", "--allowed-host", "box.lan"), "--allowed-hosts"),
        (("gateway", "--db", "usage.sqlite3"), "--ledger"),
        (("node", "--drain-seconds", "3"), "--drain-timeout-s"),
        (("plan", "--costs", "costs.json"), "--step-costs"),
        (("gateway", "--node-concurrency", "3"), "--max-concurrency-per-node"),
        (("keys", "create", "a", "--concurrent", "3"), "--max-concurrency"),
        (("eval", "--concurrency", "3"), "--max-concurrency"),
        (("cloud", "up", "cloud.yaml", "--local"), "--processes"),
        (("bench", "engine", "--running", "4"), "--max-num-seqs"),
    ],
)
def test_a_former_name_is_refused(in_process, arguments: tuple[str, ...], name: str) -> None:
    done = in_process(*arguments)
    assert done.returncode == 2
    assert f"is now `{name}`." in done.stderr


def test_a_former_value_is_refused(in_process) -> None:
    for arguments in (("--promise", "confidence"), ("--promise=confidence",), ("--promise", "level")):
        done = in_process("ask", "hi", *arguments)
        assert (done.returncode, "is now `--promise no-loss`" in done.stderr) == (2, True)


def test_a_name_that_a_command_still_has_is_its_own() -> None:
    check_renamed(["--tool-parser", "--cloud"], {"--tool-parser", "--tool-call-parser", "--node"})
    check_renamed(["--", "--cloud"], {"--cloud-url"})
    with pytest.raises(ConfigurationError, match=r"`--tool-parser` is now `--tool-call-parser`"):
        check_renamed(["--tool-parser=hermes"], {"--tool-call-parser"})
