"""Scripts of other trainers, with their own names and flags.

`overland/scripts/NAME` contains them as they will be in a user's folder; `NAME.txt` next to it says
what they are (its first line) and how to run them (the rest). They are copied, never imported.
"""

from __future__ import annotations

from pathlib import Path

from overland.errors import OverlandError
from overland.words import any_of, nearest_name

EXECUTABLE = 0o111


def scripts_folder() -> Path:
    return Path(__file__).resolve().parent.parent / "scripts"


def script_names() -> list[str]:
    return sorted(path.stem for path in scripts_folder().glob("*.txt"))


def about(name: str) -> tuple[str, str]:
    """Returns a one-line description of the scripts of this name, and how to run them."""
    text = (scripts_folder() / f"{name}.txt").read_text(encoding="utf-8")
    first, _, rest = text.partition("\n")
    return first, rest.strip("\n")


def files_of(name: str) -> list[Path]:
    """Returns the files to copy, relative to the folder they are copied to."""
    folder = scripts_folder() / name
    files = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return sorted(file for file in files if "__pycache__" not in file.parts)


def copy_scripts(name: str, folder: Path, force: bool = False) -> dict[Path, str]:
    """Copies all scripts of this name, or none; returns what became of each file that was not there
    as it is. Configs that are already there are kept, unless `force`."""
    if name not in script_names():
        near = nearest_name(name, script_names())
        hint = f"; did you mean {near}?" if near else ""
        known = ", ".join(script_names())
        raise OverlandError(f"there are no scripts from {name} (known: {known}){hint}")
    sources = {folder / file: scripts_folder() / name / file for file in files_of(name)}
    new = {to: source for to, source in sources.items() if not is_same(to, source)}
    kept = [] if force else [to for to in new if is_own_config(to)]  # they are there to be edited
    new = {to: source for to, source in new.items() if to not in kept}
    there = [str(path) for path in new if path.exists() or path.is_symlink()]
    if there and not force:
        one = len(there) == 1
        raise OverlandError(
            f"{any_of(there, 'and')} already {'exists' if one else 'exist'}; use --force to "
            f"overwrite {'it' if one else 'them'}"
        )
    for path in new:  # fails before anything is written if a file is in the way
        path.parent.mkdir(parents=True, exist_ok=True)
    for path, source in new.items():
        if path.is_symlink():
            path.unlink()
        path.write_bytes(source.read_bytes())
        make_executable(path)
    words = "kept as it is, though it differs; --force overwrites it:"
    return {**dict.fromkeys(new, "wrote"), **dict.fromkeys(kept, words)}


def is_same(path: Path, source: Path) -> bool:
    return path.is_file() and path.read_bytes() == source.read_bytes()


def is_own_config(path: Path) -> bool:
    return path.suffix in (".toml", ".yaml") and path.is_file()


def make_executable(path: Path) -> None:
    """Makes scripts with a #! line executable, since an installed package may lose file modes."""
    if path.read_bytes().startswith(b"#!"):
        path.chmod(path.stat().st_mode | EXECUTABLE)
