"""The options of the local model reach the engine, from the SDK, the settings file and the environment."""

from __future__ import annotations

from pathlib import Path

import pytest
import updraft
from updraft.local_engine.llama.context import LoraAdapter
from updraft.local_engine.options import adapter_of
from updraft.protocol.errors import ConfigurationError
from updraft.router.config import LocalModelOptions, RouterConfig
from updraft.router.factory import options_of
from updraft.router.settings_sources import load_config


def test_from_the_sdk_to_the_engine(tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp")
    from tiny_gguf import tiny_model

    tiny = tiny_model(tmp_path / "tiny.gguf").gguf
    device = LocalModelOptions(max_model_len=64, threads=1, gpu_layers=0, kv_cache_type="f16")
    with updraft.OpenAI(local=tiny, cloud_url=None, local_options=device) as client:
        (card,) = [each for each in client.models.list() if each.id == "tiny"]
        assert card.to_dict()["max_model_len"] == 64
    for wrong in (LocalModelOptions(kv_cache_type="q3"), LocalModelOptions(threads=0)):
        with pytest.raises(ConfigurationError, match="must be"):
            updraft.OpenAI(config=RouterConfig(local=str(tiny), local_options=wrong))


def test_from_a_file_and_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text('local = "m.gguf"\n[local_options]\ngpu_layers = 20\nadapters = ["a.gguf", "b.gguf:0.5"]\n')
    assert load_config(environ={}, file=file).local_options == LocalModelOptions(
        gpu_layers=20, adapters=("a.gguf", "b.gguf:0.5")
    )
    environ = {"UPDRAFT_LOCAL_OPTIONS_GPU_LAYERS": "0", "UPDRAFT_LOCAL_OPTIONS_ADAPTERS": "c.gguf"}
    assert load_config(environ=environ, file=file).local_options == LocalModelOptions(
        gpu_layers=0, adapters=("c.gguf",)
    )
    file.write_text("[local_options]\nlayers = 20\n")
    with pytest.raises(ConfigurationError, match=r"Closest: \w+, \w+, \w+\. All"):
        load_config(environ={}, file=file)


@pytest.mark.parametrize(
    ("former", "current"),
    [("context_length", "max_model_len"), ("parallel", "max_num_seqs"), ("queue_limit", "max_waiting")],
)
def test_former_names_are_errors_that_name_the_current_ones(tmp_path: Path, former: str, current: str) -> None:
    file = tmp_path / "config.toml"
    file.write_text(f'local = "m.gguf"\n[local_options]\n{former} = 20\n')
    with pytest.raises(ConfigurationError, match=rf"`{former}` in local_options in .* is now `{current}`"):
        load_config(environ={}, file=file)
    file.write_text(f'local = "m.gguf"\n[local_options]\n{current} = 20\n')
    assert getattr(options_of(load_config(environ={}, file=file)), current) == 20


def test_adapter_scale() -> None:
    assert adapter_of("b.gguf:0.5") == LoraAdapter(Path("b.gguf"), 0.5)
    assert adapter_of("C:/a.gguf") == LoraAdapter(Path("C:/a.gguf"))
    assert adapter_of("a.gguf") == LoraAdapter(Path("a.gguf"))
