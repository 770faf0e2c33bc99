"""Makes the Python environments of the nox sessions: one shared set of third-party packages, small ones on top of it.

A torch environment costs a gigabyte and most of a minute, and third-party packages are the same for all sessions. So
they are installed once, in `.nox/shared-HASH`, and every other environment sees them through a .pth file. The
project's own packages never go into the shared one: an environment has exactly those that a session installs.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import nox

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "ci" / "requirements.txt"
CONSTRAINTS = ROOT / "ci" / "constraints.txt"

# In import order. The value lists the packages that the key may import.
BELOW: dict[str, tuple[str, ...]] = {
    "metadata": (),
    "attention": ("metadata",),
    "graph": ("metadata", "attention"),
    "models": ("metadata", "attention"),
    "executor": ("metadata", "attention", "graph", "models"),
}
PACKAGES = tuple(BELOW)


def package_dir(package: str) -> Path:
    """Returns the source folder of one of `PACKAGES`."""
    return ROOT / "packages" / f"xllm-{package}"


def shared(session: nox.Session) -> Path:
    """Returns the Python of the shared third-party environment. Makes it on the first call."""
    key = hashlib.sha256(REQUIREMENTS.read_bytes() + CONSTRAINTS.read_bytes() + sys.version.encode()).hexdigest()[:12]
    folder = ROOT / ".nox" / f"shared-{key}"
    python = folder / "bin" / "python"
    done = folder / "complete"
    if not done.is_file():
        session.log("installing the third-party packages, once for all sessions")
        shutil.rmtree(folder, ignore_errors=True)
        _run(session, sys.executable, "-m", "venv", folder)
        _run(session, python, "-m", "pip", "install", "--quiet", "-r", REQUIREMENTS, "-c", CONSTRAINTS)
        done.touch()
    return python


def site_packages(session: nox.Session, python: Path) -> Path:
    """Returns the site-packages folder of an environment."""
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    output = session.run(str(python), "-c", code, external=True, silent=True, log=False)
    return Path(str(output).strip())


def layered(session: nox.Session, folder: Path, packages: Sequence[str], *, editable: bool) -> Path:
    """Returns the Python of an environment in `folder`: the shared packages and, of this project, only `packages`.

    Editable packages are linked to the source tree; otherwise wheels are built and installed when the sources changed.
    """
    base = site_packages(session, shared(session))
    python = folder / "bin" / "python"
    stamp = folder / "layered"
    wanted = f"{base}\n{sys.version}"
    if not stamp.is_file() or stamp.read_text() != wanted:
        shutil.rmtree(folder, ignore_errors=True)
        # pip and setuptools come from the shared environment: venv may bring an old setuptools.
        _run(session, sys.executable, "-m", "venv", "--without-pip", folder)
        (site_packages(session, python) / "shared.pth").write_text(f"{base}\n")
        stamp.write_text(wanted)
    pip = (shared(session), "-m", "pip", "--python", python)
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    if editable:
        arguments = [part for package in packages for part in ("--editable", package_dir(package))]
        _run(session, *pip, "install", *options, *arguments)
    else:
        sources = [package_dir(package) for package in packages]
        # A reinstall changes the modification times of the bridge's sources, which makes cmake rebuild all C++.
        installed, fingerprint = folder / "installed", _fingerprint(sources)
        if installed.is_file() and installed.read_text() == fingerprint:
            return python
        installed.unlink(missing_ok=True)
        wheels = folder / "wheels"
        shutil.rmtree(wheels, ignore_errors=True)
        for source in sources:  # setuptools would pack stale files that were deleted from src
            shutil.rmtree(source / "build", ignore_errors=True)
        _run(session, *pip, "wheel", *options, "--wheel-dir", wheels, *sources)
        _run(session, *pip, "install", "--force-reinstall", *options, *sorted(wheels.glob("*.whl")))
        installed.write_text(fingerprint)
    return python


def _fingerprint(sources: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for source in sources:
        for path in sorted([source / "pyproject.toml", *(source / "src").rglob("*")]):
            if path.is_file() and "__pycache__" not in path.parts and ".egg-info" not in str(path):
                digest.update(str(path.relative_to(source)).encode() + path.read_bytes())
    return digest.hexdigest()


def _run(session: nox.Session, *command: object) -> None:
    session.run(*(str(part) for part in command), external=True, silent=True)
