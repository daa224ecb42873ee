"""Token views: of a head against its dense Jacobian, written by a scan, and kept in a store."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import lipscope
from lipscope.cli.main import app
from lipscope.models.checkpoints import Loaded
from lipscope.models.load import ZOO, ByteTokenizer, Entry
from lipscope.models.tokens import token_view
from lipscope.report.page import scopes_command, tokens_command
from lipscope.report.settings import report_data
from lipscope.runs.plan import Plan
from lipscope.runs.run import LONGEST_VIEW, Run, load_run, worst_inputs
from lipscope.runs.sweep import run_plan
from model_families import FAMILIES
from report_cases import make_rows
from sweep_cases import TEXT, plan_of, save_models

runner = CliRunner()


def load_tiny(name: str, files: object = None) -> Loaded:
    model = FAMILIES["gpt2"]()
    model.resize_token_embeddings(256, mean_resizing=False)
    torch.manual_seed(2)
    torch.nn.init.normal_(model.get_input_embeddings().weight)
    return Loaded(model, ByteTokenizer(), name, ("random weights",))


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ZOO, "tiny", Entry("tiny", "two layers", "none", "none", load_tiny))


@pytest.mark.parametrize("family", ["bert", "llama", "bloom"])
def test_the_view_of_a_head_is_that_of_its_dense_jacobian(family: str) -> None:
    model = FAMILIES[family]()
    model.resize_token_embeddings(256)
    handle = lipscope.load(model, ByteTokenizer())
    recording = handle.record(handle.token_inputs(text="hello"))
    whole = recording[1].operator("head", analytic=False).to_dense()[0]
    heads, n, d = handle.layer(1).heads, 5, 16
    for head in range(heads):
        view = token_view(handle, "hello", 1, head=head)
        # Rows of the output of all heads that belong to this one.
        J = whole.reshape(n, heads, -1, n * d)[:, head].reshape(-1, n * d)
        values = torch.linalg.svdvals(J)
        torch.testing.assert_close(
            view.result.singular_values.to(values), values[: len(view.result.singular_values)], rtol=1e-3, atol=1e-9
        )
        blocks = J.reshape(n, -1, n, d).transpose(1, 2)
        torch.testing.assert_close(view.influence.to(J), torch.linalg.svdvals(blocks)[..., 0], rtol=1e-3, atol=1e-9)
        right = torch.linalg.svd(J)[2][0].reshape(n, d)
        torch.testing.assert_close(view.energy.to(J), right.square().sum(-1), rtol=1e-2, atol=1e-4)
        assert view.result.lower <= values[0] <= view.result.upper
        assert (view.layer, view.head, view.result.scope) == (1, head, "head")


def test_scope_head_needs_a_head() -> None:
    handle = lipscope.load(load_tiny("tiny").model, ByteTokenizer())
    with pytest.raises(ValueError, match="needs the index of a head"):
        token_view(handle, "hello", 0, scope="head")
    with pytest.raises(ValueError, match="head must lie between"):
        token_view(handle, "hello", 0, head=99)


def test_the_worst_input_of_the_worst_places_is_looked_at() -> None:
    rows = make_rows(layers=3, heads=2, lengths=(8, 32, 2 * LONGEST_VIEW), inputs=3)
    found = worst_inputs(rows, 2)
    assert [(row["layer"], row["head"], row["n"]) for row in found] == [(2, 1, 32), (2, 0, 32)]
    for row in found:
        rivals = [r for r in rows if (r["layer"], r["head"], r["n"]) == (row["layer"], row["head"], row["n"])]
        assert row["estimate"] == max(r["estimate"] for r in rivals)
    long = [r for r in rows if r["n"] > LONGEST_VIEW]
    assert worst_inputs(long, 1)[0]["n"] == 2 * LONGEST_VIEW


def test_a_scan_keeps_its_story_and_its_views(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    out = tmp_path / "out"
    scan = [
        "scan",
        "tiny",
        "--text",
        str(tmp_path / "text.txt"),
        "--per-head",
        "--lengths",
        "6,8,10",
        "--inputs",
        "2",
        "--seed",
        "5",
    ]
    done = runner.invoke(app, [*scan, "--views", "2", "--out", str(out)])
    assert done.exit_code == 0, done.output
    run = load_run(out)
    assert run.provenance.seeds == (5,)
    assert run.provenance.environments[0]["versions"]["lipscope"] == lipscope.__version__
    assert run.provenance.command is not None
    assert run.provenance.command.startswith(f"lipscope scan tiny --text {tmp_path / 'text.txt'}")
    assert "--seed 5" in run.provenance.command
    views = json.loads((out / "tokens.json").read_text())
    assert len(views) == 2
    for view in views:
        # The view looks at the very input that the row was measured on.
        (row,) = [r for r in run.rows if all(r[name] == view[name] for name in ("layer", "head", "n", "input"))]
        assert view["estimate"] == pytest.approx(row["estimate"], rel=2e-3)
        assert "".join(view["tokens"]) in TEXT
        assert sum(view["energy"]) == pytest.approx(1, abs=1e-4)
    # The command that it names makes the same rows again.
    again = runner.invoke(app, [*run.provenance.command.replace(str(out), str(tmp_path / "again")).split()[1:]])
    assert again.exit_code == 0, again.output
    times = {"seconds"}
    rows = [json.loads((place / "rows.json").read_text()) for place in (out, tmp_path / "again")]
    assert [{k: v for k, v in r.items() if k not in times} for r in rows[0]] == [
        {k: v for k, v in r.items() if k not in times} for r in rows[1]
    ]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text(TEXT)
    run_plan(plan_with_views(tmp_path, 1), tmp_path / "run.db")
    return tmp_path / "run.db"


def plan_with_views(place: Path, views: int) -> Plan:
    return Plan.of(
        models=["tiny"],
        texts=[str(place / "text.txt")],
        scopes=["attention", "block"],
        lengths=[6, 9],
        inputs=2,
        views=views,
    )


def test_a_sweep_looks_at_its_worst_inputs(store: Path) -> None:
    run = load_run(store)
    assert [view["scope"] for view in run.views] == ["attention", "block"]
    for view in run.views:
        (row,) = [r for r in run.rows if all(r[name] == view[name] for name in ("layer", "scope", "n", "input"))]
        assert view["estimate"] == pytest.approx(row["estimate"], rel=2e-3)
        assert "".join(view["tokens"]) in TEXT
        assert (view["model"], view["text"]) == (row["model"], row["text"])
    # Views are no rows of the table, and what is asked for later is measured then, and nothing twice.
    assert {row["kind"] for row in run.rows} == {"text"}
    again = run_plan(plan_with_views(store.parent, 2), store)
    assert (again.measured, again.failed, again.kept) == (0, 0, again.tasks)
    more = load_run(store).views
    assert len(more) == 4
    assert [view for view in more if view in run.views] == list(run.views)


def test_the_report_of_a_store(store: Path, tmp_path: Path) -> None:
    done = runner.invoke(app, ["report", str(store), "--out", str(tmp_path / "report.html")])
    assert done.exit_code == 0, done.output
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Token view" in page
    assert page.count('class="panel view"') == 2
    assert "lipscope sweep plan.toml --store run.db" in page
    assert "scopes = [&#34;attention&#34;, &#34;block&#34;]" in page


def test_a_report_reads_a_store_and_measures_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store may come from someone else: whatever its plan names, neither models nor loaders are touched."""
    save_models(tmp_path)
    run_plan(plan_of(tmp_path, scopes=["attention"], lengths=[6], inputs=1), tmp_path / "run.db")
    called: list[Any] = []
    monkeypatch.setattr("sweep_cases.with_bytes", lambda *given: called.append(given))
    done = runner.invoke(app, ["report", str(tmp_path / "run.db"), "--out", str(tmp_path / "report.html")])
    assert done.exit_code == 0, done.output
    assert "sweep_cases:with_bytes" in (load_run(tmp_path / "run.db").provenance.plan or "")
    assert "No token views were measured" in (tmp_path / "report.html").read_text(encoding="utf-8")
    assert called == []


def _byte_level(vocabulary: dict[str, int], merges: list[tuple[str, str]]) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|end|>")


@pytest.fixture(scope="module")
def byte_level() -> Any:
    from tokenizers import pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [("â", "Ģ"), ("ð", "Ł"), ("ä", "¸"), ("Ġ", "w")]
    names = [*letters, *("".join(pair) for pair in pairs)]
    return _byte_level({name: i for i, name in enumerate(names)}, pairs)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a wé", ["a", " w", "é…", "…é"]),
        ("“", ["“…", "…“"]),
        ("😀", ["😀…", "…😀…", "…😀"]),
        ("中", ["中…", "…中"]),
        ("م\n", ["م…", "…م", "\\n"]),
        ("e\u0301", ["e", "\u0301…", "…\u0301"]),
    ],
)
def test_bytes_are_shown_as_the_characters_that_they_spell(byte_level: Any, text: str, expected: list[str]) -> None:
    from lipscope.models.tokens import readable_tokens

    assert readable_tokens(byte_level, byte_level(text)["input_ids"]) == expected


def test_bytes_that_spell_nothing_and_special_tokens_are_shown_as_they_are(byte_level: Any) -> None:
    from lipscope.models.tokens import readable_tokens

    half = byte_level("😀")["input_ids"][:1]
    end = byte_level.convert_tokens_to_ids("<|end|>")
    assert readable_tokens(byte_level, [*half, end]) == ["⟨F0⟩⟨9F⟩", "<|end|>"]


def test_pieces_and_bytes_of_sentencepiece() -> None:
    from lipscope.models.tokens import readable_tokens

    class Pieces:
        all_special_tokens = ("<s>",)

        def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
            return [["<s>", "▁Alice", "<0xE4>", "<0xB8>", "<0xAD>"][i] for i in ids]

    assert readable_tokens(Pieces(), range(5)) == ["<s>", " Alice", "中…", "…中…", "…中"]


def test_what_the_report_suggests_works_for_a_model_without_a_norm_before_attention(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(ZOO, "post", Entry("post", "two layers", "none", "none", load_post))
    rows = lipscope.scan("post", ["The quick brown fox jumps over the lazy dog. " * 9], lengths=[8], inputs=1).rows
    Path("book.txt").write_text("The quick brown fox jumps over the lazy dog. " * 9, encoding="utf-8")
    (setting,) = report_data([load_run(Run(rows, {"text": "book.txt"}))]).settings
    for command in (scopes_command(setting), tokens_command(setting, setting.worst)):
        assert command is not None
        done = runner.invoke(app, shlex.split(command)[1:])
        assert done.exit_code == 0, done.output
        assert not re.search(r"failed\s+[1-9]", done.output), done.output


def load_post(name: str, files: object = None) -> Loaded:
    model = FAMILIES["bert"]()
    model.resize_token_embeddings(256, mean_resizing=False)
    return Loaded(model, ByteTokenizer(), name, ())
