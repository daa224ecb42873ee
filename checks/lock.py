"""The lock: every package that lipscope may install, with its version and the hashes of its files.

    python checks/lock.py                   is constraints.txt in step with pyproject.toml and with what is installed here?
    python checks/lock.py --write           ask the package index for the hashes anew; versions stay as they are written
    python checks/lock.py --install GROUP…  install what groups of pyproject.toml need (base, report, dev, …), then lipscope

Hashes are those of wheels for Linux (x86-64 and arm64) and macOS, for CPython 3.11 to 3.14; of a package without such
wheels, that of its source. torch is the exception: see the head of constraints.txt.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import re
import ssl
import subprocess
import sys
import tomllib
import urllib.request
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "constraints.txt"
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
# What makes of these sources a package; needed to install it without asking the index for anything unpinned.
BUILD = ("hatchling", "editables", "packaging", "pathspec", "pluggy", "tomlkit", "trove-classifiers")

HEAD = """\
# Every dependency of lipscope, of its extras and of its build, pinned, with the hashes of its files, and below them the
# groups of pyproject.toml that need it. Written by `make lock`, checked by `make test`. To install from it:
# `python checks/lock.py --install GROUP…` (base, report, all, dev, …).
#
# torch: the hashes are those of the package index, and that of the CPU build for Linux x86-64, Python 3.11. The index's own
# build for Linux x86-64 needs some gigabytes of CUDA packages, which are not listed here: where no CPU build is at hand,
# --install pins versions and checks no hashes, and says so. CPU builds for other Pythons are in torch's own index and are
# not listed either.
"""


def canonical(name: str) -> str:
    """The name of a package as the index spells it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read_lock() -> dict[str, tuple[str, list[str], list[str]]]:
    """Version, hashes and groups of every package."""
    found = {}
    for entry in re.split(r"\n(?=\S)", LOCK.read_text(encoding="utf-8")):
        if pin := re.match(r"([A-Za-z0-9._-]+)==([^\s\\]+)", entry):
            groups = re.search(r"^ *# (.*)$", entry, re.MULTILINE)
            hashes = re.findall(r"sha256:([0-9a-f]{64})", entry)
            found[canonical(pin[1])] = (pin[2], hashes, groups[1].split(", ") if groups else [])
    return found


def groups() -> dict[str, list[str]]:
    """What pyproject.toml asks for: ``base``, its extras, and ``build``."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = {name: lines for name, lines in project["optional-dependencies"].items() if name != "all"}
    return {"base": project["dependencies"], **extras, "build": list(BUILD)}


def environments() -> Iterator[dict[str, str]]:
    """The machines that the lock is for, as requirements see them."""
    for python in PYTHONS:
        for system, name, machine in (
            ("Linux", "linux", "x86_64"),
            ("Linux", "linux", "aarch64"),
            ("Darwin", "darwin", "arm64"),
        ):
            yield {
                "python_version": python, "python_full_version": f"{python}.0", "platform_system": system,
                "sys_platform": name, "platform_machine": machine, "os_name": "posix", "implementation_name": "cpython",
                "platform_python_implementation": "CPython",
            }  # fmt: skip


def needed(group: str, problems: list[str]) -> set[str]:
    """The packages that a group needs on any of the machines, by what is installed here; notes versions that do not fit."""
    from packaging.requirements import Requirement

    lock, asked, machines = read_lock(), groups(), list(environments())
    seen: set[tuple[str, str]] = set()
    waiting = [Requirement(line) for line in asked[group]]
    while waiting:
        requirement = waiting.pop()
        name = canonical(requirement.name)
        if name == "lipscope":
            waiting += [Requirement(line) for extra in requirement.extras for line in asked[extra]]
            continue
        if name not in lock:
            problems.append(f"{name} is needed ({group}) and not locked")
            continue
        if not requirement.specifier.contains(lock[name][0], prereleases=True):
            problems.append(f"{name} is locked at {lock[name][0]}, but {requirement} is needed ({group})")
        for extra in ("", *requirement.extras):
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            try:
                inner = [Requirement(line) for line in metadata.requires(name) or ()]
            except metadata.PackageNotFoundError:
                continue
            waiting += [
                one for one in inner
                if one.marker is None or any(one.marker.evaluate(machine | {"extra": extra}) for machine in machines)
            ]  # fmt: skip
    return {name for name, _ in seen}


def members() -> tuple[dict[str, list[str]], list[str]]:
    """The groups of every package, and what does not fit."""
    problems: list[str] = []
    found: dict[str, list[str]] = {}
    for group in groups():
        for name in needed(group, problems):
            found.setdefault(name, []).append(group)
    return found, problems


def check() -> list[str]:
    """Everything in which the lock is out of step."""
    lock, (found, problems) = read_lock(), members()
    for name, (version, hashes, listed) in lock.items():
        if not hashes:
            problems.append(f"{name} has no hashes")
        if sorted(listed) != sorted(found.get(name, [])):
            problems.append(
                f"{name} is needed by {', '.join(found.get(name, ['nothing']))}, the lock says {', '.join(listed)}"
            )
        try:
            here = metadata.version(name).partition("+")[0]
        except metadata.PackageNotFoundError:
            continue
        if here != version:
            problems.append(f"{name} is locked at {version}, installed is {here}")
    return sorted(set(problems))


def wanted(file: str) -> bool:
    """Whether a wheel is for one of the machines."""
    *_, python, abi, places = file.removesuffix(".whl").split("-")
    ours = tuple(f"cp{version.replace('.', '')}" for version in PYTHONS)
    if abi not in (*ours, "none", "abi3") or not any(tag.startswith(("py3", "cp3")) for tag in python.split(".")):
        return False
    if abi == "none" and python.startswith("cp") and python not in ours:
        return False
    if abi == "abi3" and int(python.removeprefix("cp3") or 0) > 14:
        return False
    machine = re.compile(r"any|(many)?linux.*_(x86_64|aarch64)|macosx_.*_(arm64|x86_64|universal2)")
    return any(machine.fullmatch(place) for place in places.split("."))


def wheels_here() -> list[Path]:
    """Wheels in directories that pip is told to look into."""
    asked = subprocess.run(
        [sys.executable, "-m", "pip", "config", "get", "global.find-links"], capture_output=True, text=True
    )
    places = f"{os.environ.get('PIP_FIND_LINKS', '')} {asked.stdout if asked.returncode == 0 else ''}".split()
    return [file for place in dict.fromkeys(places) for file in Path(place).glob("*.whl")]


def hashes_of(name: str, version: str) -> list[str]:
    """Hashes of the files of one version, by the index that pip is set up for, and of wheels that lie on this machine."""
    from pip._internal.models.index import PyPI

    trust = ssl.create_default_context(cafile=os.environ.get("PIP_CERT"))
    page = os.environ.get("PIP_INDEX_URL", PyPI.simple_url).rstrip("/")
    with urllib.request.urlopen(f"{page}/{name}/", timeout=60, context=trust) as answer:
        links = dict(re.findall(r'href="[^"]*/([^"/#]+)#sha256=([0-9a-f]{64})"', answer.read().decode()))
    wheel = re.compile(rf"[A-Za-z0-9_.]+-{re.escape(version)}(-\d\w*)?-[^-]+-[^-]+-[^-]+\.whl")
    source = re.compile(rf"(.*)-{re.escape(version)}\.(tar\.gz|zip)")
    links = {file.replace("%2B", "+"): value for file, value in links.items()}
    found = [value for file, value in links.items() if wheel.fullmatch(file) and wanted(file)]
    found = found or [value for file, value in links.items() if source.fullmatch(file)]
    found += [
        hashlib.sha256(file.read_bytes()).hexdigest()
        for file in wheels_here()
        if file.name.startswith(f"{name.replace('-', '_')}-{version}+cpu-")
    ]
    if not found:
        raise SystemExit(f"the index has no file of {name} {version}")
    return sorted(set(found))


def write() -> None:
    """The lock anew, with the versions it has."""
    lock, (found, _) = read_lock(), members()
    lines = [HEAD]
    for name, (version, _, _) in sorted(lock.items()):
        files = "".join(f" \\\n    --hash=sha256:{value}" for value in hashes_of(name, version))
        lines.append(f"{name}=={version}{files}\n    # {', '.join(sorted(found.get(name, ['nothing'])))}\n")
    LOCK.write_text("".join(lines), encoding="utf-8")


def torch_build() -> str | None:
    """What to add to the version of torch for a build whose packages are all locked; None when there is none at hand."""
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        return ""
    wheel = f"torch-{read_lock()['torch'][0]}+cpu-cp{sys.version_info.major}{sys.version_info.minor}-"
    return "+cpu" if any(file.name.startswith(wheel) for file in wheels_here()) else None


def install(chosen: Iterable[str]) -> None:
    """Install what groups need, and lipscope from these sources."""
    wanted = {"base", "build", *chosen}
    if "all" in wanted:
        wanted |= groups().keys() - {"dev"}
    lock = {name: entry for name, entry in read_lock().items() if wanted & set(entry[2])}
    build = torch_build()
    if build is None:
        print("no CPU build of torch is at hand: versions are pinned, hashes are not checked", file=sys.stderr)
    lines = []
    for name, (version, hashes, _) in lock.items():
        files = "" if build is None else "".join(f" --hash=sha256:{value}" for value in hashes)
        lines.append(f"{name}=={version}{build or '' if name == 'torch' else ''}{files}")
    requirements = Path(sys.prefix) / ".requirements.txt"
    requirements.write_text("\n".join(lines) + "\n", encoding="utf-8")
    pip = [sys.executable, "-m", "pip", "install", "--quiet"]
    for what in (
        [*([] if build is None else ["--require-hashes"]), "--requirement", str(requirements)],
        ["--no-deps", "--no-build-isolation", "--editable", str(ROOT)],
    ):
        if code := subprocess.run([*pip, *what]).returncode:
            raise SystemExit(code)


def main() -> None:
    """Check, write or install."""
    parser = argparse.ArgumentParser(description="The lock of all dependencies: check it, write it, install from it.")
    parser.add_argument("--write", action="store_true", help="ask the index for the hashes anew")
    parser.add_argument("--install", nargs="+", metavar="GROUP", help="install what these groups need")
    options = parser.parse_args()
    if options.install:
        install(options.install)
        return
    if options.write:
        write()
    problems = check()
    for problem in problems:
        print(problem)
    if problems:
        raise SystemExit(f"{LOCK.name} is out of step; change its versions or pyproject.toml, then `make lock`")
    print(f"{LOCK.name}: {len(read_lock())} packages, in step with pyproject.toml")


if __name__ == "__main__":
    main()
