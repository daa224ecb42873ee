"""What lipscope is made of: the licences of all locked packages, and a software bill of materials.

    python checks/bill.py                   is docs/licences.md in step with constraints.txt and what is installed here?
    python checks/bill.py --write           write it anew
    python checks/bill.py --sbom FILE       a bill of materials: CycloneDX 1.5, JSON

Everything is read from the metadata of the packages that are installed here and from the lock; nothing is asked for.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import uuid
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from lock import ROOT, canonical, groups, read_lock

PAGE = ROOT / "docs" / "licences.md"

HEAD = """\
# Licences

lipscope itself is under the Apache License 2.0. This page lists the licence that every package of `constraints.txt` states
in its metadata. It is written by `checks/bill.py` from what is installed (`make lock`), and `make lint` checks it. Only the
group *base* is needed to measure; the others are extras, tests, documentation and the build. Nothing of it is part of
lipscope's own package. `make sbom` writes a bill of materials (CycloneDX, JSON) with versions, hashes and dependencies.

"""


def licence(name: str) -> str:
    """The licence of a package as it states it: an expression, else its classifiers, else its first line of text."""
    about = metadata.metadata(name)
    if expression := about.get("License-Expression"):
        return str(expression)
    classifiers = [line.rpartition(" :: ")[2] for line in about.get_all("Classifier") or () if line.startswith("License ::")]
    stated = str(about.get("License") or "").strip().removeprefix("UNKNOWN")
    if stated and "\n" not in stated and len(stated) < 60:
        return stated
    if named := [line for line in classifiers if line != "OSI Approved"]:
        return ", ".join(named)
    return stated.splitlines()[0].strip() if stated else "not stated"


def installed() -> list[str]:
    """The locked packages that are installed here."""
    there = {canonical(found.name) for found in metadata.distributions()}
    return [name for name in sorted(read_lock()) if name in there]


def page() -> str:
    """The page of all licences."""
    lock = read_lock()
    lines = ["| package | version | licence | group |", "|---|---|---|---|"]
    for name in installed():
        version, _, listed = lock[name]
        lines.append(f"| {name} | {version} | {licence(name).replace('|', '/')} | {', '.join(listed)} |")
    return HEAD + "\n".join(lines) + "\n"


def bill() -> dict[str, Any]:
    """The bill of materials: lipscope, every package it may install, and who needs whom."""
    from packaging.requirements import Requirement

    lock = read_lock()
    about = metadata.metadata("lipscope")
    root = {"type": "library", "bom-ref": "lipscope", "name": "lipscope", "version": about["Version"],
            "licenses": [{"expression": "Apache-2.0"}]}  # fmt: skip
    parts, edges = [], [{"ref": "lipscope", "dependsOn": sorted(needed_directly())}]
    for name in installed():
        version, hashes, listed = lock[name]
        parts.append({
            "type": "library", "bom-ref": name, "name": name, "version": version, "purl": f"pkg:pypi/{name}@{version}",
            "scope": "required" if "base" in listed else "optional", "licenses": [{"license": {"name": licence(name)}}],
            "properties": [{"name": "lipscope:group", "value": group} for group in listed]
            + [{"name": "lipscope:file-sha256", "value": value} for value in hashes],
        })  # fmt: skip
        inner = (Requirement(line) for line in metadata.requires(name) or ())
        there = {canonical(one.name) for one in inner if one.marker is None or one.marker.evaluate({"extra": ""})}
        edges.append({"ref": name, "dependsOn": sorted(there & lock.keys())})
    return {
        "bomFormat": "CycloneDX", "specVersion": "1.5", "serialNumber": f"urn:uuid:{uuid.uuid4()}", "version": 1,
        "metadata": {"timestamp": datetime.now(UTC).isoformat(timespec="seconds"), "component": root},
        "components": parts, "dependencies": edges,
    }  # fmt: skip


def needed_directly() -> set[str]:
    """The packages that pyproject.toml itself names."""
    named = (re.match(r"[A-Za-z0-9._-]+", line) for lines in groups().values() for line in lines)
    return {canonical(found[0]) for found in named if found} & set(installed())


def main() -> None:
    """Check, write the page, or write the bill."""
    parser = argparse.ArgumentParser(description="Licences of all dependencies, and a software bill of materials.")
    parser.add_argument("--write", action="store_true", help="write docs/licences.md anew")
    parser.add_argument("--sbom", type=Path, metavar="FILE", help="write a bill of materials")
    options = parser.parse_args()
    if options.sbom is not None:
        options.sbom.parent.mkdir(parents=True, exist_ok=True)
        options.sbom.write_text(json.dumps(bill(), indent=1) + "\n", encoding="utf-8")
        print(f"the bill of materials is in {options.sbom}")
        return
    if options.write:
        PAGE.write_text(page(), encoding="utf-8")
    listed = dict(re.findall(r"^\| (\S+) \| (\S+) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE))
    lock = read_lock()
    wrong = sorted(name for name in lock if listed.get(name) != lock[name][0]) + sorted(
        listed.keys() - lock.keys() - {"package", "---"}
    )
    if wrong:
        sys.exit(f"{PAGE.name} is out of step for {', '.join(wrong)}: run `make lock`")
    print(f"{PAGE.name}: {len(lock)} packages")


if __name__ == "__main__":
    main()
