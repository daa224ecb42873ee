"""The lock of all dependencies is in step with pyproject.toml, has a hash for every file, and says when it is not."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def run(script: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, script, *map(str, arguments)], capture_output=True, text=True, timeout=120)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The files that the lock is about, to be changed."""
    (tmp_path / "checks").mkdir()
    (tmp_path / "docs").mkdir()
    for name in ("checks/lock.py", "checks/bill.py", "constraints.txt", "pyproject.toml", "docs/licences.md"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def test_it_is_in_step() -> None:
    for script in ("lock.py", "bill.py"):
        found = run(ROOT / "checks" / script)
        assert found.returncode == 0, found.stdout + found.stderr


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        ("pyproject.toml", '"numpy>=1.26"', '"numpy>=99"', "numpy is locked at"),
        ("pyproject.toml", '"rich>=13"', '"rich>=13", "left-pad>=1"', "left-pad is needed (base) and not locked"),
        ("constraints.txt", r"\nrich==(?s:.*?)\n(?=\S)", "\n", "rich is needed (base) and not locked"),
        ("constraints.txt", r"( \\\n    --hash=sha256:\w+)+\n    # base\n", "\n    # base\n", "has no hashes"),
        ("constraints.txt", r"\nnumpy==", r"\nsix-seven==1.0\nnumpy==", "six-seven has no hashes"),
        ("constraints.txt", r"\nclick==[\d.]+", r"\nclick==8.0.1", "installed is"),
    ],
)  # fmt: skip
def test_it_says_when_it_is_not(copy: Path, file: str, old: str, new: str, said: str) -> None:
    before = (copy / file).read_text()
    after = re.sub(old if file == "constraints.txt" else re.escape(old), new, before, count=1)
    assert after != before
    (copy / file).write_text(after)
    found = run(copy / "checks" / "lock.py")
    assert found.returncode == 1
    assert said in found.stdout
    assert "out of step" in found.stderr


def test_pages_of_licences_follow_the_lock(copy: Path) -> None:
    page = copy / "docs" / "licences.md"
    page.write_text(re.sub(r"\n\| rich \|.*", "", page.read_text()))
    found = run(copy / "checks" / "bill.py")
    assert found.returncode == 1
    assert "out of step for rich" in found.stderr


def test_a_bill_of_materials_has_every_part_with_licence_and_hashes(tmp_path: Path) -> None:
    found = run(ROOT / "checks" / "bill.py", "--sbom", tmp_path / "sbom.json")
    assert found.returncode == 0, found.stderr
    bill = json.loads((tmp_path / "sbom.json").read_text())
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.5")
    parts = {part["bom-ref"]: part for part in bill["components"]}
    assert {"torch", "numpy", "transformers", "pytest", "mkdocs"} <= parts.keys()
    assert all(part["licenses"][0]["license"]["name"] for part in parts.values())
    assert all(any(p["name"].endswith("sha256") for p in part["properties"]) for part in parts.values())
    for edge in bill["dependencies"]:
        assert {edge["ref"], *edge["dependsOn"]} <= parts.keys() | {"lipscope"}
