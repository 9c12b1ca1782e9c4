"""State folders for tests. They are empty except for native code, which takes seconds to build."""

from pathlib import Path

from updraft.protocol.settings import state_folder


def home_in(folder: Path) -> Path:
    """Create an `UPDRAFT_HOME` that shares the current home's native code. Call this before changing the variable."""
    built, home = state_folder() / "native", folder / "home"
    home.mkdir(mode=0o700)
    if built.is_dir():
        (home / built.name).symlink_to(built)
    return home
