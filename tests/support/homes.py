"""State folders of tests: nothing of anybody else's in them but native code, which takes seconds to build."""

from pathlib import Path

from updraft.protocol.settings import state_folder


def home_in(folder: Path) -> Path:
    """A new `UPDRAFT_HOME`. Ask before the variable is changed."""
    built, home = state_folder() / "native", folder / "home"
    home.mkdir(mode=0o700)
    if built.is_dir():
        (home / built.name).symlink_to(built)
    return home
