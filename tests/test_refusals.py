"""Models that cannot be measured are refused at the door, naming what is wrong with them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import lipscope
from lipscope.cli.main import app
from lipscope.models.checkpoints import mark_drawn
from lipscope.studies.paper.cast import causal_bert
from model_families import FAMILIES


def saved(directory: Path) -> Path:
    FAMILIES["bert"]().float().save_pretrained(directory)
    return directory


def test_damaged_files(tmp_path: Path) -> None:
    (saved(tmp_path) / "model.safetensors").write_bytes(b"garbage")
    with pytest.raises(ValueError, match="are damaged"):
        lipscope.load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        lipscope.load(tmp_path)


def without(directory: Path, *left_out: str, shapes: Sequence[str] = ()) -> Path:
    """A saved model whose file lacks some tensors and holds others in another shape."""
    file = directory / "model.safetensors"
    kept = {name: tensor for name, tensor in load_file(file).items() if not any(part in name for part in left_out)}
    kept |= {name: tensor[..., :1].contiguous() for name, tensor in kept.items() if any(part in name for part in shapes)}
    save_file(kept, file, metadata={"format": "pt"})
    return directory


def test_weights_that_the_checkpoint_does_not_hold(tmp_path: Path) -> None:
    """They would be random numbers, others in every run: σ of them is refused, and the tensors are named."""
    one = without(saved(tmp_path / "one"), "layer.1.attention.self.query.weight")
    with pytest.raises(ValueError, match=r"^1 tensor .* encoder\.layer\.1\.attention\.self\.query\.weight \(missing\)"):
        lipscope.load(one)
    every = without(saved(tmp_path / "every"), "e")
    with pytest.raises(ValueError, match=r"^37 tensors .* embeddings\.LayerNorm\.bias \(missing\), .* and 33 more"):
        lipscope.load(every, dtype=torch.float64)
    with pytest.raises(ValueError, match="37 tensors"):
        causal_bert(str(every))
    shape = without(saved(tmp_path / "shape"), shapes=["layer.0.output.dense.weight"])
    with pytest.raises(ValueError, match=r"layer\.0\.output\.dense\.weight \(stored as \(16, 1\), needed as \(16, 24\)\)"):
        lipscope.load(shape)
    done = CliRunner().invoke(app, ["scan", str(one), "--lengths", "4", "--inputs", "1"])
    assert done.exit_code == 2
    assert "would be random numbers" in done.output


def test_an_expert_that_no_token_reached(tmp_path: Path) -> None:
    """It is used at other tokens, as the experts beside it are at these."""
    config = transformers.MixtralConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, intermediate_size=16,
        vocab_size=50, num_local_experts=8,
    )  # fmt: skip
    transformers.MixtralModel(config).save_pretrained(tmp_path)
    assert len(lipscope.load(tmp_path).layers) == 1
    with pytest.raises(ValueError, match=r"mlp\.experts\.down_proj"):
        lipscope.load(without(tmp_path, "experts.3"))


def indexed(directory: Path, file: str) -> Path:
    """A saved model whose index says that all its weights are in ``file``, beside a whole file that nothing names."""
    names = load_file(saved(directory) / "model.safetensors")
    (directory / "model.safetensors").rename(directory / "other.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, file)}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


@pytest.mark.parametrize("file", ["../outside.bin", "inside.bin", "../outside.safetensors", "link.safetensors", "ABSOLUTE"])
def test_weights_come_from_the_directory_and_from_safetensors(tmp_path: Path, file: str) -> None:
    directory = indexed(tmp_path / "model", file.replace("ABSOLUTE", str(tmp_path / "outside.safetensors")))
    tensors = load_file(directory / "other.safetensors")
    save_file(tensors, tmp_path / "outside.safetensors", metadata={"format": "pt"})
    for pickle in (tmp_path / "outside.bin", directory / "inside.bin"):
        torch.save(tensors, pickle)
    (directory / "link.safetensors").symlink_to("../outside.safetensors")
    with pytest.raises(ValueError, match=r"from outside|as a part of its weights, which can run code"):
        lipscope.load(directory)
    if file == "inside.bin":
        (directory / "link.safetensors").unlink()
        assert len(lipscope.load(directory, allow_pickle=True).layers) == 2
    else:
        with pytest.raises(ValueError, match="from outside"):
            lipscope.load(directory, allow_pickle=True)


def test_an_adapter_does_not_lead_to_another_model(tmp_path: Path) -> None:
    other, directory = saved(tmp_path / "other"), saved(tmp_path / "model")
    (directory / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(other), "peft_type": "LORA"}))
    with pytest.raises(ValueError, match=r"holds an adapter .*merge_and_unload"):
        lipscope.load(directory)


def test_the_two_towers_of_clip_and_the_attention_of_deberta() -> None:
    tower = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    settings = transformers.CLIPConfig(
        text_config=tower | {"vocab_size": 100}, vision_config=tower | {"image_size": 32, "patch_size": 16}, projection_dim=8
    )
    clip = transformers.CLIPModel(settings).eval()
    with pytest.raises(ValueError, match="two towers: say which, --part text or --part vision"):
        lipscope.load(clip)
    assert [lipscope.load(clip, part=part).layers[0].mask for part in ("text", "vision")] == ["causal", "full"]
    sizes = tower | {"vocab_size": 100, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8}
    deberta = transformers.DebertaV2Model(transformers.DebertaV2Config(**sizes)).eval()
    found = lipscope.load(deberta)
    assert [layer.name for layer in found.layers] == ["encoder.layer.0"]
    # W_O, and not the projection of relative positions, which is the last one inside the attention module
    assert found.layers[0].out is deberta.encoder.layer[0].attention.output.dense
    with pytest.raises(TypeError, match="inputs must be a table"):
        lipscope.load("gpt2-mini").record("a text")  # type: ignore[arg-type]


def test_a_pickle_called_safetensors(tmp_path: Path) -> None:
    torch.save({}, indexed(tmp_path, "part.safetensors") / "part.safetensors")
    with pytest.raises(ValueError, match=r"damaged: part\.safetensors"):
        lipscope.load(tmp_path)


def test_the_cache_of_the_hub_is_made_of_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "models--someone--small"
    snapshot = home / "snapshots" / "a1"
    snapshot.mkdir(parents=True)
    (home / "blobs").mkdir()
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text("a1")
    directory = indexed(tmp_path / "model", "other.safetensors")
    for number, file in enumerate(directory.iterdir()):
        file.rename(home / "blobs" / f"{number}")
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    assert len(lipscope.load(snapshot).layers) == 2
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    for stream in (False, True):
        model = lipscope.load("someone/small", stream=stream)
        assert (model.name, len(model.layers)) == ("someone/small", 2)
    (snapshot / "other.safetensors").unlink()
    (tmp_path / "outside.bin").touch()
    (snapshot / "other.safetensors").symlink_to("../../../outside.bin")
    for name in (snapshot, "someone/small"):
        with pytest.raises(ValueError, match="from outside"):
            lipscope.load(name)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("[]", "must hold an object of JSON, got list"), ("5", "got int"), ("null", "got NoneType"), ("{", "not JSON"),
        ("[" * 100_000, "not JSON"), ('{"model_type": 5}', "model type `5`"), ("{}", "model_type"),
        ('{"model_type": "bert", "hidden_size": "wide"}', "hidden_size"),
        ('{"model_type": "bert", "attn_implementation": "someone/kernel"}', "attention code from the hub"),
        ('{"model_type": "bert", "transformers_weights": "../outside.safetensors"}', "from outside"),
        ('{"model_type": "bert", "transformers_weights": 5}', "as a part of its weights"),
    ],
)  # fmt: skip
def test_configurations_that_make_no_sense(tmp_path: Path, config: str, message: str) -> None:
    (saved(tmp_path) / "config.json").write_text(config)
    with pytest.raises(ValueError, match=message):
        lipscope.load(tmp_path)


@pytest.mark.parametrize("index", ["[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 3}}'])
def test_indices_that_make_no_sense(tmp_path: Path, index: str) -> None:
    (indexed(tmp_path, "x") / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ValueError, match=r"index\.json must hold"):
        lipscope.load(tmp_path)


class _Sparse(torch.nn.Module):
    """A layer with two experts of which the first serves every token."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2))
        self.norm = torch.nn.BatchNorm1d(8)
        self.head = torch.nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.experts[0](self.layer(x))
        y = self.norm(y.transpose(1, 2)).transpose(1, 2)
        return y, self.head(y)


@pytest.mark.parametrize(("name", "used"), [("experts.1.bias", True), ("norm.running_var", True), ("head.weight", False)])
def test_what_counts_as_used(name: str, used: bool) -> None:
    module = _Sparse().eval()
    mark_drawn(module, {name: "missing"})
    with pytest.raises(ValueError, match=name.replace(".", r"\.")) if used else nullcontext():
        lipscope.load(module)


def test_heads_that_are_not_measured_may_be_missing(tmp_path: Path) -> None:
    """A base model from the checkpoint of a task and the reverse, tied weights, encoder–decoder models: no false alarm."""
    assert len(lipscope.load(without(saved(tmp_path / "pooler"), "pooler.")).layers) == 2
    assert len(lipscope.load(without(saved(tmp_path / "shape"), shapes=["pooler.dense.weight"])).layers) == 2
    small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 50}
    transformers.BertForMaskedLM(transformers.BertConfig(**small)).save_pretrained(tmp_path / "task")
    assert len(lipscope.load(tmp_path / "task").layers) == 2
    config = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=50)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "tied")
    assert "lm_head.weight" not in load_file(tmp_path / "tied" / "model.safetensors")
    assert len(lipscope.load(tmp_path / "tied").layers) == 2
    for kind in (transformers.AutoModelForMaskedLM, transformers.AutoModelForSequenceClassification):
        assert len(lipscope.load(kind.from_pretrained(tmp_path / "pooler").eval()).layers) == 2
    config = transformers.T5Config(d_model=16, num_layers=2, num_heads=2, d_kv=8, d_ff=32, vocab_size=50)
    transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path / "t5")
    assert len(lipscope.load(without(tmp_path / "t5", "decoder."), part="encoder").layers) == 2
    with pytest.raises(ValueError, match=r"block\.1\.layer\.0\.SelfAttention\.q\.weight"):
        lipscope.load(without(tmp_path / "t5", "encoder.block.1.layer.0.SelfAttention.q"), part="encoder")


def test_nan_weights_name_the_parameter() -> None:
    model = FAMILIES["bert"]()
    model.encoder.layer[1].attention.self.query.weight.data[0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"parameter encoder\.layer\.1\.attention\.self\.query\.weight holds NaN"):
        lipscope.load(model)


def test_overflowing_activations_name_the_module() -> None:
    model = FAMILIES["gpt2"]().float()
    model.h[1].attn.c_attn.weight.data *= 1e37
    with pytest.raises(FloatingPointError, match=r"h\.1\.attn\.c_attn|layer 1 \(h\.1\)"):
        lipscope.load(model)


def test_a_file_is_not_a_model(tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_bytes(b"")
    with pytest.raises(FileNotFoundError, match="a model is a directory"):
        lipscope.load(tmp_path / "model.pt")


def test_certificates_that_do_not_exist_are_not_promised() -> None:
    handle = lipscope.load(FAMILIES["mpnet"]())
    recording = handle.record({"input_ids": torch.tensor([[3, 9, 20, 7]])})
    with pytest.raises(ValueError, match="no certificate for scope 'attention'"):
        recording[0].sigma(certificate=True)
    assert recording[0].sigma().certified is None


def test_options_of_loading_are_not_ignored_by_what_is_loaded():
    """They would be measured without, in silence."""
    model = lipscope.load("gpt2-mini")
    with pytest.raises(ValueError, match="dtype: too late for a Model"):
        lipscope.scan(model, "python-docs", lengths=[8], inputs=1, layers=[0], dtype=torch.float64)
    with pytest.raises(ValueError, match="attn_implementation: too late for a GPT2Model"):
        lipscope.load(model.model, attn_implementation="eager")
    with pytest.raises(TypeError, match="scopes"):
        lipscope.scan(model, "python-docs", lengths=[8], inputs=1, layers=[0], scopes=["block"])
