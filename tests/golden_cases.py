"""What must not change when the source moves: rows over models of every kind, tables of bounds, certificates, pages.

``python tests/golden_cases.py`` writes tests/golden/ anew; test_golden.py compares. Numbers were frozen on one thread.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import bound_cases
import lipscope
from model_families import FAMILIES
from sweep_cases import TEXT

GOLDEN = Path(__file__).parent / "golden"
LOADER = "golden_cases:with_bytes"
MODELS = ("bert", "gpt2", "llama", "gemma2", "t5_encoder", "mistral", "gpt_oss")
# Times, and hashes that say where a row came from rather than what it is.
VOLATILE = ("seconds", "key", "model", "text", "model_digest", "text_digest", "batch_digest", "input_digest")


def save_models(directory: Path) -> None:
    """Models of two layers that read bytes, in float32, and a text."""
    for family in MODELS:
        model = FAMILIES[family]()
        model.resize_token_embeddings(256, mean_resizing=False)
        torch.manual_seed(2)
        torch.nn.init.normal_(model.get_input_embeddings().weight)
        model.float().save_pretrained(directory / f"tiny-{family}")
    (directory / "text.txt").write_text(TEXT, encoding="utf-8")


def with_bytes(name: str, dtype: torch.dtype | None) -> Any:
    """The saved model, or its encoder, with the tokenizer that it was not saved with."""
    from lipscope.models.load import ByteTokenizer, load_named

    model = load_named(name).model
    return lipscope.Model(model.encoder if hasattr(model, "decoder") else model, ByteTokenizer(), name=name, dtype=dtype)


def sweep_rows(directory: Path) -> list[dict[str, Any]]:
    """62 tasks: every scope, packed inputs, heads, windows, soft-caps, sinks, relative positions, both dtypes."""
    from lipscope.runs import Plan, Store, run_plan
    from lipscope.runs.plan import Block, ModelChoice

    def of(*families: str) -> list[ModelChoice]:
        return [ModelChoice(str(directory / f"tiny-{family}"), loader=LOADER) for family in families]

    text = {"texts": [str(directory / "text.txt")]}
    plan = Plan((
        Block(models=of(*MODELS), **text, scopes=["attention", "head"], lengths=[9], inputs=2),
        Block(models=of("gpt2", "llama"), **text, scopes=["norm+attention", "attention+residual", "block", "model"],
              lengths=[7], inputs=2),
        Block(models=of("bert"), **text, scopes=["attention+residual", "block"], lengths=[7], inputs=2),
        Block(models=of("bert", "gpt2"), **text, kind="packed", scopes=["attention", "head"], lengths=[24], inputs=1),
        Block(models=of("gpt2", "mistral"), **text, dtype="float64", lengths=[12], inputs=3, seed=3, rtol=1e-6),
        Block(models=of("llama"), **text, scopes=["head"], heads=[1, 3], lengths=[5, 24], inputs=1),
    ))  # fmt: skip
    run_plan(plan, directory / "run.db")
    with Store(directory / "run.db") as store:
        rows = store.rows()
    kept = [{name: value for name, value in row.items() if name not in VOLATILE} | {"name": Path(row["model"]).name}
            for row in rows]  # fmt: skip
    return sorted(kept, key=lambda row: json.dumps(row, sort_keys=True))


def bound_tables() -> list[dict[str, float]]:
    """Tables of twelve layers, with and without tokens."""
    tables = []
    for seed in range(12):
        case = bound_cases.problem(seed, n_max=16, plain=seed % 4 == 0)
        found = (
            lipscope.bounds.table(case.layer, case.X)
            if seed % 3
            else lipscope.bounds.table(case.layer, radius=2.0, n=len(case.X))
        )
        tables.append({bound.name: float(bound.value) for bound in found.bounds})
    return tables


def certificates() -> list[list[float]]:
    """Certified upper ends of thirty layers at their tokens, whole and head by head."""
    values = []
    for seed in range(100, 130):
        case = bound_cases.problem(seed, n_max=32)
        for scope in ("attention", "head"):
            found = lipscope.local_lipschitz(case.layer, case.X, scope=scope, certificate=True)
            values.append(torch.as_tensor(found.certified).flatten().tolist())
    return values


def scan_directory(directory: Path) -> dict[str, str]:
    """What ``lipscope scan --out`` writes and ``lipscope report`` makes of it, without times."""
    from typer.testing import CliRunner

    from lipscope.cli.main import app

    out, page = directory / "scan", directory / "page.html"
    for command in (
        f"scan gpt2-mini --text alice --layers 0,1 --lengths 8,16 --inputs 2 --out {out}",
        f"report {out} --out {page}",
    ):
        done = CliRunner().invoke(app, command.split())
        assert done.exit_code == 0, done.output
    files = {
        path.name: path.read_text(encoding="utf-8") for path in sorted(out.iterdir()) if path.suffix in (".csv", ".json")
    }
    words = re.sub(r"<(script|style)\b.*?</\1>", " ", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    words = re.sub(r"<[^>]+>", " ", words)
    found = files | {"page": re.sub(r"\s+", " ", words).strip()}
    return {name: text.replace(str(directory), "DIRECTORY") for name, text in found.items()}


def freeze() -> None:
    """Write all of them."""
    os.environ.setdefault("COLUMNS", "100")
    with tempfile.TemporaryDirectory() as place:
        save_models(Path(place))
        write("rows", sweep_rows(Path(place)))
        write("scan", scan_directory(Path(place)))
    write("tables", bound_tables())
    write("certificates", certificates())


def write(name: str, value: Any) -> None:
    """One file, one item a line."""
    GOLDEN.mkdir(exist_ok=True)
    lines = ",\n".join(json.dumps(item, ensure_ascii=False) for item in value) if isinstance(value, list) else None
    text = f"[\n{lines}\n]\n" if lines is not None else json.dumps(value, indent=1, ensure_ascii=False) + "\n"
    (GOLDEN / f"{name}.json").write_text(text, encoding="utf-8")


def frozen(name: str) -> Any:
    """What was written."""
    return json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.path.insert(0, str(Path(__file__).parent))
    freeze()
