"""A page of headings, paragraphs, tables and figures, as Markdown and as one HTML file that needs no network."""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:62rem;margin:2rem auto;padding:0 1rem;color:#222}"
    "table{border-collapse:collapse;font-size:14px;display:block;overflow-x:auto}td,th{padding:.2rem .7rem;text-align:left;"
    "border-bottom:1px solid #ddd}img{max-width:100%}code{background:#f3f3f3;padding:0 .2rem}"
)


@dataclass(frozen=True)
class Table:
    """A table of text."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Section:
    """A heading and what stands under it."""

    heading: str
    paragraphs: Sequence[str] = ()
    bullets: Sequence[str] = ()
    table: Table | None = None
    figures: Sequence[str] = ()


@dataclass(frozen=True)
class Page:
    """A page.

    Attributes:
        title: its heading.
        lead: paragraphs below it.
        sections: the rest.
    """

    title: str
    lead: Sequence[str]
    sections: Sequence[Section] = field(default=())

    def to_markdown(self) -> str:
        """The page as Markdown; figures are links to PNG files beside it."""
        parts = [f"# {self.title}", *self.lead]
        for section in self.sections:
            parts += [f"## {section.heading}", *section.paragraphs]
            if section.bullets:
                parts.append("\n".join(f"- {bullet}" for bullet in section.bullets))
            if section.table is not None:
                parts.append(_markdown_table(section.table))
            parts += [f"![{name}](figures/{name}.png)" for name in section.figures]
        return "\n\n".join(parts) + "\n"

    def to_html(self, figures: Path) -> str:
        """The page as one HTML file with the PNG files of a directory inside."""
        parts = [f"<h1>{html.escape(self.title)}</h1>", *(f"<p>{_inline(text)}</p>" for text in self.lead)]
        for section in self.sections:
            parts.append(f"<h2>{html.escape(section.heading)}</h2>")
            parts += [f"<p>{_inline(text)}</p>" for text in section.paragraphs]
            if section.bullets:
                parts.append("<ul>" + "".join(f"<li>{_inline(text)}</li>" for text in section.bullets) + "</ul>")
            if section.table is not None:
                parts.append(_html_table(section.table))
            parts += [_image(figures / f"{name}.png") for name in section.figures]
        head = f"<meta charset='utf-8'><title>{html.escape(self.title)}</title><style>{_STYLE}</style>"
        return f"<!doctype html><html lang='en'><head>{head}</head><body>{''.join(parts)}</body></html>\n"


def _markdown_table(table: Table) -> str:
    def line(cells: Sequence[str]) -> str:
        # ‖ is safe; a plain bar would end the cell.
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    return "\n".join([line(table.header), "|" + "---|" * len(table.header), *(line(row) for row in table.rows)])


def _html_table(table: Table) -> str:
    head = "".join(f"<th>{_inline(cell)}</th>" for cell in table.header)
    body = "".join("<tr>" + "".join(f"<td>{_inline(cell)}</td>" for cell in row) + "</tr>" for row in table.rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _inline(text: str) -> str:
    """Escaped text, with `code` marked."""
    parts = html.escape(text).split("`")
    return "".join(part if i % 2 == 0 else f"<code>{part}</code>" for i, part in enumerate(parts))


def _image(path: Path) -> str:
    data = base64.b64encode(path.read_bytes()).decode()
    return f"<p><img alt='{html.escape(path.stem)}' src='data:image/png;base64,{data}'></p>"
