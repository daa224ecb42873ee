"""What a command is about: MODEL, WEIGHTS or ``random``, told apart by one rule, and the tokens that a model reads.

    random                              a layer with random weights
    a file, or NAME.safetensors         the weights of one layer
    anything else                       a model: a known name, a directory, a hub name

Options that belong to another kind of source are refused, never ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lipscope.cli.options import Loading, Target, Weights, as_dtype
from lipscope.cli.terminal import as_text, notice, waiting
from lipscope.doors import read_json
from lipscope.runs.writing import write_file

if TYPE_CHECKING:
    from torch import Tensor

    from lipscope.attention.layer import Attention
    from lipscope.models.model import Model
    from lipscope.report.charts import Chart
    from lipscope.studies.rows import Row

DEFAULT_TEXT, DEFAULT_N = "python-docs", 32


@dataclass(frozen=True, eq=False)
class Found:
    """A source: either the layer itself, or a model and the index of a layer."""

    name: str  # in words, for titles
    attention: Attention | None = None  # the layer of a weights file, or with random weights
    model: Model | None = None  # the model
    layer: int = 0  # index of the layer in it
    text: str = DEFAULT_TEXT  # what a model reads

    def identified(self, rows: list[Row], head: int | None = None, *, read: bool = True) -> list[Row]:
        """The rows of a study with whose they are; ``read`` when a model read the text."""
        who: Row = {"model": self.name, "layer": self.layer, "head": head, "text": None}
        if self.model is not None:
            who |= {"model": self.model.name, "text": self.text if read else None}
        if head is not None:
            who["scope"] = "head"
        return [row | who for row in rows]

    def part(self, head: int | None) -> Attention:
        """The layer that is no model's, or one of its heads."""
        assert self.attention is not None
        return self.attention if head is None else self.attention.head(head)

    def title(self, head: int | None) -> str:
        """The name, with the head."""
        return self.name if head is None else f"{self.name}, head {head}"


def find(source: str, target: Target, *, seed: int = 0, any_mask: bool = False, **model: Any) -> Found:
    """The source that a command was given; refuses options that belong to another kind of source.

    ``heads`` and ``mask`` also apply to random weights, ``mask`` to a model if ``any_mask``; ``model`` are further options
    that belong to one, None when not given.
    """
    of_model = [*(["--layer"] if target.layer is not None else []), *target.given(Loading)]
    of_model += [f"--{name}" for name, value in model.items() if value is not None]
    if source == "random":
        from lipscope.studies.variants import random_layer

        refuse(of_model, "a model", "random weights are those of one layer")
        refuse(replace(target, heads=None, mask=None).given(Weights), "a weights file", "random weights have no file")
        drawn = random_layer(target.width or 16, heads=target.heads or 2, mask=target.mask, seed=seed)
        return Found(f"random weights, d = {drawn.width}", drawn)
    refuse([] if target.width is None else ["--width"], "random weights", f"{source} has a width of its own")
    if source.endswith(".safetensors") or Path(source).is_file():
        from lipscope.attention.io import load_layer

        refuse(of_model, "a model", f"{source} is a file with the weights of one layer")
        return Found(Path(source).name, load_layer(Path(source), **target.settings(Weights)))
    of_file = replace(target, mask=None) if any_mask else target
    refuse(of_file.given(Weights), "a weights file", f"{source} is a model")
    look_at_source(source, model.get("text"), target)
    handle = load_model(source, target)
    index = handle.layer(target.layer or 0).index
    return Found(f"{handle.name}, layer {index}", model=handle, layer=index, text=model.get("text") or DEFAULT_TEXT)


def keep(out: Path, rows: list[Row], *charts: Chart, endings: Sequence[str] = ("png", "html"), **files: Any) -> None:
    """Write the rows of a study, its figures, and further files, as bytes or as JSON, into a directory."""
    from lipscope.studies.rows import write_study

    write_study(out, rows, *charts, endings=endings)
    for name, content in files.items():
        kept = isinstance(content, bytes)
        write_file(out / f"{name}.{'safetensors' if kept else 'json'}", content if kept else as_text(content))
    notice(f"rows and figures are in {out}")


def refuse(given: list[str], owner: str, reason: str) -> None:
    """Raise when options were given that belong to something else."""
    if given:
        raise ValueError(f"{', '.join(given)} belong{'s' if len(given) == 1 else ''} to {owner}, but {reason}")


def look_first(model: str, text: str | None = None, layers: Sequence[int] | None = None, *, out: Path | None = None) -> None:
    """Refuse at once what can be refused before torch is imported, which takes seconds."""
    import lipscope.models
    from lipscope.models.checkpoints import refuse_directory
    from lipscope.models.corpora import CORPORA, read_text

    directory = Path(model).expanduser()
    if not directory.exists() and (model.startswith((".", "/", "~")) or model.count("/") > 1):
        raise FileNotFoundError(f"no directory {model!r}: name one with a saved model, or a model of `lipscope models`")
    if "/" in model and directory.is_dir():
        refuse_directory(directory, allow_pickle=True)
    if text is not None and text not in CORPORA and not Path(text).expanduser().exists():
        read_text(text)  # which says that it is not there, and what is
    shipped = Path(str(lipscope.models.__file__)).parent / "data" / model
    config = (directory if directory.is_dir() else shipped) / "config.json"
    told = read_json(config, dict) if layers and config.is_file() else {}
    count = next((told[name] for name in ("num_hidden_layers", "n_layer", "num_layers") if name in told), None)
    for index in layers or ():
        if isinstance(count, int) and not -count <= index < count:
            raise ValueError(f"layer must lie between 0 and {count - 1}, got {index}")
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)  # says what is wrong where that cannot be a directory
    with waiting("importing torch and transformers"):
        import lipscope.models.load


def look_at_source(source: str, text: str | None, target: Target) -> None:
    """``look_first``, where the source is a model."""
    if source != "random" and not source.endswith(".safetensors") and not Path(source).is_file():
        look_first(source, text, None if target.layer is None else [target.layer])


def load_model(name: str, loading: Loading, **more: Any) -> Model:
    """The model, loaded as the options say."""
    from lipscope.models.load import load

    return load(name, **loading.settings(Loading) | {"dtype": as_dtype(loading.dtype)} | more)


def read_ids(model: Model, text: str | None, say: str | None, n: int | None, seed: int) -> Tensor:
    """Token ids (n,) of the words themselves, or of a stretch of n tokens of a text."""
    if say is not None:
        both = [f"--{name}" for name, value in (("text", text), ("n", n)) if value is not None]
        refuse(both, "a text", "--say gives the words themselves")
        ids: Tensor = model.token_inputs(text=say)["input_ids"][0]
        return ids
    from lipscope.models.corpora import read_text
    from lipscope.models.text import chunks_of

    return chunks_of(model, read_text(text or DEFAULT_TEXT), DEFAULT_N if n is None else n, seed=seed)[0]


def media_given(text: str | None, audio: Path | None, image: Path | None, features: Path | None) -> dict[str, Any]:
    """The clip, image or features that stand in place of a text; refuses more than one of them."""
    given = {"text": text, "audio": audio, "image": image, "features": features}
    given = {name: value for name, value in given.items() if value is not None}
    if len(given) > 1:
        raise ValueError(f"--{' and --'.join(given)} exclude each other: a model reads one of them")
    return {name: value for name, value in given.items() if name != "text"}
