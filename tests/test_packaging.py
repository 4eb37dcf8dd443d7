"""What is built and installed is what stands in the folders, under the names that users import."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("agent", "collector", "profiler_ctl")


def run(*command: str | Path, cwd: Path, env: dict[str, str] | None = None) -> str:
    """The standard output of a command that must succeed."""
    result = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout


def project_files() -> list[Path]:
    """The files that a clone would have, relative to the root: those git knows, or would add."""
    listing = run(
        "git", "-c", "safe.directory=*", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT
    )
    return sorted(path for name in listing.split("\0") if name and (ROOT / (path := Path(name))).is_file())


def sources() -> list[Path]:
    return [path for path in project_files() if path.parts[0] in FOLDERS and path.suffix == ".py"]


def toml_list(after: str) -> list[str]:
    """The strings of the list in pyproject.toml that follows `after` (Python 3.10 has no TOML reader)."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    body = re.search(re.escape(after) + r"\s*\[(.*?)\]", text, re.DOTALL)
    assert body is not None
    return re.findall(r'"([^"]+)"', body[1])


def clean_environment(**more: str) -> dict[str, str]:
    """The environment without what could lead an interpreter back to the checkout."""
    return {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")} | more


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a clean copy of the checkout, in an isolated build environment."""
    copy = tmp_path_factory.mktemp("copy")
    for path in project_files():
        (copy / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, copy / path)
    out = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "build", "--wheel", "--outdir", out, ".", cwd=copy, env=clean_environment())
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` folder of a fresh virtual environment outside the checkout that holds the wheel.

    The dependencies come from the environment that runs the tests; rankd itself must come from the wheel.
    """
    place = tmp_path_factory.mktemp("venv")
    venv.create(place, with_pip=True)
    python = place / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel, cwd=place, env=clean_environment())
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=place).strip())
    # A plain path entry: it comes after the wheel's own folder, and .pth files in it (an editable rankd) are not read.
    (site / "dependencies.pth").write_text("\n".join(p for p in sys.path if p.endswith("-packages")) + "\n")
    return place / "bin"


@pytest.mark.slow
def test_the_wheel_holds_the_folders_and_nothing_else(wheel: Path) -> None:
    """Every .py of the three folders and each py.typed is in the wheel under rankd/, and nothing more."""
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    expected = {f"rankd/{path.as_posix()}" for path in sources()} | {f"rankd/{folder}/py.typed" for folder in FOLDERS}
    assert names == expected


@pytest.mark.slow
def test_every_module_of_the_wheel_can_be_imported(installed: Path, tmp_path: Path) -> None:
    """Each module imports from the installed wheel, outside the checkout."""
    names = [
        ".".join(("rankd", *(path.parent if path.stem == "__init__" else path.with_suffix("")).parts))
        for path in sources()
    ]
    script = f"import importlib\nfor name in {names!r}:\n    print(importlib.import_module(name).__file__)\n"
    files = run(installed / "python", "-c", script, cwd=tmp_path, env=clean_environment()).split()
    assert len(files) == len(names)
    assert [f for f in files if not Path(f).is_relative_to(installed.parent)] == []


@pytest.mark.slow
def test_a_training_script_with_an_agent_of_its_own_still_gets_ours(installed: Path, tmp_path: Path) -> None:
    """Files named like our folders beside the training script shadow nothing of ours, nor ours them."""
    for name in FOLDERS:
        (tmp_path / f"{name}.py").write_text(f"WHOSE = 'the user, {name}'\n")
    (tmp_path / "train.py").write_text(
        "import agent, collector, profiler_ctl\n"
        "import rankd.agent, rankd.collector.protocol.wire, rankd.profiler_ctl\n"
        "for module in (agent, collector, profiler_ctl):\n"
        "    assert module.WHOSE == f'the user, {module.__name__}'\n"
        "for module in (rankd.agent, rankd.collector, rankd.profiler_ctl):\n"
        "    assert not hasattr(module, 'WHOSE')\n"
        "assert rankd.collector.protocol.wire.PROTOCOL_VERSION\n"
    )
    run(installed / "python", "train.py", cwd=tmp_path, env=clean_environment())


@pytest.mark.slow
def test_the_command_is_installed(installed: Path, tmp_path: Path) -> None:
    """`rankd --help` works right after the installation and says what rankd is."""
    assert "rankd" in run(installed / "rankd", "--help", cwd=tmp_path, env=clean_environment())


def test_the_package_list_is_what_is_on_disk() -> None:
    """pyproject.toml names every package; a forgotten one would be missing from the wheel."""
    on_disk = {".".join(("rankd", *path.parent.parts)) for path in sources()}
    assert sorted(toml_list("packages =")) == sorted(on_disk)


def machine_paths(text: str) -> Sequence[str]:
    """Absolute paths of somebody's own machine."""
    folders = "|".join(("home/[a-z]", "root", "work", "Users", "opt"))
    return re.findall(rf"(?<![\w.~$}}/-])/(?:{folders})\b[\w/.-]*", text)


@pytest.mark.parametrize("path", project_files(), ids=str)
def test_no_file_mentions_a_path_of_a_machine(path: Path) -> None:
    """Code, documents and examples work on any machine: they name no absolute path of the writer's."""
    assert machine_paths((ROOT / path).read_text(encoding="utf-8", errors="replace")) == []


@pytest.mark.parametrize(
    ("text", "found"),
    [("cd /" + "work/main", ["/" + "work/main"]), ("see /" + "root", ["/" + "root"]), ("a/" + "work/b, ~/opt", [])],
)
def test_machine_paths_are_recognised(text: str, found: list[str]) -> None:
    """The search for machine paths finds absolute ones and leaves relative ones alone."""
    assert machine_paths(text) == found
