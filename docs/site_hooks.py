"""MkDocs hooks: pages that mkdocs.yml does not list still find their place in the navigation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any


def listed(nav: list[Any]) -> Iterator[str]:
    """Every page that a navigation names."""
    for entry in nav:
        target = next(iter(entry.values())) if isinstance(entry, dict) else entry
        yield from listed(target) if isinstance(target, list) else (target,)


def complete(nav: list[Any], pages: list[str]) -> list[Any]:
    """The navigation with all pages: one that is missing comes last in the section that has pages of its folder.

    Args:
        nav: as in mkdocs.yml.
        pages: paths of all pages, relative to the docs.

    Returns:
        A new navigation.
    """
    missing = sorted(set(pages) - set(listed(nav)))
    done: list[Any] = []
    for entry in nav:
        target = next(iter(entry.values())) if isinstance(entry, dict) else entry
        if not isinstance(target, list):
            done.append(entry)
            continue
        folders = {str(Path(page).parent) for page in listed(target)}
        added = [page for page in missing if str(Path(page).parent) in folders]
        missing = [page for page in missing if page not in added]
        done.append({next(iter(entry)): [*target, *added]})
    return [*done, *missing]


def on_config(config: Any) -> Any:
    """Called by MkDocs once the configuration is read."""
    root = Path(config.docs_dir)
    config.nav = complete(config.nav, [path.relative_to(root).as_posix() for path in root.rglob("*.md")])
    return config
