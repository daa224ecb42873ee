"""A streamed model gives the bits of the model in memory, holds one layer at a time, and goes on where it was killed."""

from __future__ import annotations

import gc
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import command
import lipscope
from lipscope.models.load import ByteTokenizer
from lipscope.models.recorded import RecordedLayer
from lipscope.models.stored import Checkpoint, fits
from lipscope.models.streaming import Stream, StreamedPass
from lipscope.runs import Store
from lipscope.runs.estimate import ways
from lipscope.runs.schema import table_digest

WORDS = ["".join(chr(97 + (7 * i * i + i // 5) % 26) for i in range(2000))]
LAYERS = 4


def made(kind: str, **changed: Any) -> Any:
    torch.manual_seed(0)
    size = {"hidden_size": 48, "num_attention_heads": 4, "intermediate_size": 96, "vocab_size": 260} | {
        "num_hidden_layers": LAYERS
    }
    match kind:
        case "llama":
            return transformers.LlamaForCausalLM(transformers.LlamaConfig(**size | {"num_key_value_heads": 2} | changed))
        case "bert":
            return transformers.BertForMaskedLM(transformers.BertConfig(**size | {"max_position_embeddings": 64} | changed))
        case "albert":
            small = size | {"embedding_size": 24, "max_position_embeddings": 64}
            return transformers.AlbertModel(transformers.AlbertConfig(**small | changed))
        case "gemma2":
            windows = {"num_key_value_heads": 2, "head_dim": 12, "sliding_window": 8}
            return transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**size | windows | changed))
        case "t5":
            small = {"d_model": 48, "d_kv": 12, "d_ff": 96, "num_layers": LAYERS, "num_heads": 4, "vocab_size": 260}
            return transformers.T5ForConditionalGeneration(transformers.T5Config(**small | changed))
        case "gptj":  # its positions are in a buffer that is made on loading
            small = {"n_embd": 48, "n_layer": LAYERS, "n_head": 4, "rotary_dim": 8, "vocab_size": 260}
            return transformers.GPTJModel(transformers.GPTJConfig(**small | changed))
        case "llama4":
            more = {"num_key_value_heads": 2, "head_dim": 12, "num_local_experts": 2, "intermediate_size_mlp": 48}
            config = transformers.Llama4TextConfig(**size | more | {"pad_token_id": 0} | changed)
            model = transformers.Llama4TextModel(config)
            for p in model.parameters():  # its experts are not drawn
                p.data.normal_(0, 0.02) if p.ndim == 3 else None
            return model
        case "mixtral":
            experts = {"num_key_value_heads": 2, "num_local_experts": 3}
            return transformers.MixtralForCausalLM(transformers.MixtralConfig(**size | experts | changed))
    config = transformers.GPT2Config(n_embd=48, n_layer=LAYERS, n_head=4, vocab_size=260, n_positions=64, **changed)
    return transformers.GPT2LMHeadModel(config)


def saved(directory: Path, kind: str, dtype: torch.dtype = torch.bfloat16, **changed: Any) -> Path:
    made(kind, **changed).to(dtype).save_pretrained(directory, max_shard_size="50KB")
    assert len(list(directory.glob("*.safetensors"))) > 1
    return directory


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("streaming") / "llama", "llama")


def rows_of(model: Any, scope: str, **how: Any) -> list[dict[str, Any]]:
    ids = torch.arange(10).reshape(2, 5) * 7 % 250 + 5
    heads = [1] if scope == "head" else None
    rows = model.record(input_ids=ids, **how).rows(scope=scope, heads=heads)
    return [{k: v for k, v in row.items() if k != "seconds"} for row in rows]


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert", "albert", "gemma2", "t5", "mixtral", "gptj", "llama4"])
def test_rows_are_those_of_the_model_in_memory_to_the_last_bit(tmp_path: Path, kind: str) -> None:
    directory = saved(tmp_path / kind, kind)
    options: dict[str, Any] = {"part": "encoder"} if kind == "t5" else {}
    whole = lipscope.load(directory, ByteTokenizer(), **options)
    streamed = lipscope.load(directory, ByteTokenizer(), stream=True, **options)
    assert streamed.describe() == whole.describe()
    scopes = (
        ["head", "attention", "norm+attention", "attention+residual", "block"] if kind == "llama" else ["attention", "block"]
    )
    for scope in scopes:
        assert rows_of(streamed, scope) == rows_of(whole, scope)
    padding = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    assert rows_of(streamed, "block", attention_mask=padding) == rows_of(whole, "block", attention_mask=padding)


def test_buffers_that_a_checkpoint_holds_are_read_too(tmp_path: Path) -> None:
    """Gemma-4 scales every block by a number that it keeps in a buffer."""
    size = {
        "hidden_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "vocab_size": 260,
    }
    size |= {"head_dim": 12, "global_head_dim": 12, "num_hidden_layers": LAYERS, "hidden_size_per_layer_input": 0}
    torch.manual_seed(0)
    scaled = transformers.Gemma4TextModel(transformers.Gemma4TextConfig(**size))
    for number, block in enumerate(scaled.layers):
        block.layer_scalar.fill_(0.1 + 0.2 * number)
    scaled.save_pretrained(tmp_path)
    whole, streamed = (lipscope.load(tmp_path, stream=stream) for stream in (False, True))
    for scope in ("attention", "block"):
        assert rows_of(streamed, scope) == rows_of(whole, scope)


def test_an_expert_that_is_missing_or_of_another_shape_is_refused_by_name(tmp_path: Path) -> None:
    """Experts are stored one by one, and are one tensor in the model."""
    saved(tmp_path, "mixtral")
    held = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    name = "model.layers.2.block_sparse_moe.experts.1.w2.weight"
    shard = tmp_path / held[name]
    good = load_file(shard)
    for wrong in (None, good[name][:, :-1].contiguous()):
        tensors = {k: v for k, v in (good | {name: wrong}).items() if v is not None}
        save_file(tensors, shard)
        with pytest.raises(
            ValueError, match=r"safetensors: layers\.2\.mlp\.experts\.down_proj is not made of what is stored"
        ):
            lipscope.load(tmp_path, stream=True)


def test_float64_streams_too(tmp_path: Path) -> None:
    directory = saved(tmp_path / "llama", "llama", torch.float64)
    whole, streamed = (lipscope.load(directory, ByteTokenizer(), stream=stream) for stream in (False, True))
    assert streamed.dtype == torch.float64
    assert rows_of(streamed, "attention") == rows_of(whole, "attention")
    narrow = lipscope.load(directory, dtype=torch.float32, stream=True)
    assert rows_of(narrow, "attention") == rows_of(lipscope.load(directory, dtype=torch.float32), "attention")


def test_layers_in_any_order(llama: Path) -> None:
    whole, streamed = (lipscope.load(llama, stream=stream) for stream in (False, True))
    recorded = streamed.record(input_ids=torch.arange(12)[None])
    expected = whole.record(input_ids=torch.arange(12)[None])
    for layer in (2, 3, 0, 3, 3, 1):
        assert float(recorded[layer].sigma().estimate[0]) == float(expected[layer].sigma().estimate[0])


def living(least: int) -> int:
    """Bytes of all tensors that are alive and have at least so many, each storage once."""
    storages = {}
    for thing in gc.get_objects():
        if type(thing) in (torch.Tensor, torch.nn.Parameter) and thing.device.type == "cpu":
            storages[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
    return sum(size for size in storages.values() if size >= least)


def test_one_layer_is_in_memory_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Matrices and copies of them are counted; the tokens of the self-tests, which are recorded for all layers, are smaller.
    wide = {
        "hidden_size": 128,
        "intermediate_size": 352,
        "num_key_value_heads": 4,
        "num_hidden_layers": 12,
        "vocab_size": 64,
    }
    directory, whole = saved(tmp_path / "llama", "llama", **wide), made("llama", **wide)
    one = sum(p.numel() * 4 for p in whole.model.layers[0].parameters())
    assert sum(p.numel() * 4 for p in whole.parameters()) > 12 * one
    del whole
    gc.collect()
    gc.freeze()  # what was there before is no longer looked at
    peaks, at_sigma = [0], []
    hold, sigma = Stream.hold, RecordedLayer.sigma

    def holding(stream: Stream, module: torch.nn.Module) -> None:
        held = stream.held
        hold(stream, module)
        if stream.held is not held:
            peaks.append(living(64 * 128 * 4))

    def measuring(*args: Any, **kwargs: Any) -> Any:
        result = sigma(*args, **kwargs)
        at_sigma.append(living(64 * 128 * 4))
        return result

    monkeypatch.setattr(Stream, "hold", holding)
    monkeypatch.setattr(RecordedLayer, "sigma", measuring)
    model = lipscope.load(directory, ByteTokenizer(), stream=True)
    result = lipscope.scan(model, ["0123456789" * 60], lengths=[8], inputs=1)
    assert len(result.rows) == 12
    gc.unfreeze()
    assert one <= max(*peaks, *at_sigma) <= 2 * one


def scanned(directory: Path, keep: Path) -> lipscope.Run:
    model = lipscope.load(directory, ByteTokenizer(), stream=True)
    return lipscope.scan(model, WORDS, lengths=[8, 16], inputs=2, store=keep)


def killed_after(tasks: int, directory: Path, keep: Path) -> int:
    """How a process ended that is killed when it has saved so many tasks."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    save, done = Store.save, []

    def saving(*args: Any) -> None:
        save(*args)
        done.append(args)
        if len(done) == tasks:
            os.kill(os.getpid(), signal.SIGKILL)

    try:
        Store.save = saving  # type: ignore[method-assign]
        scanned(directory, keep)
    finally:
        os._exit(1)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_scan_that_is_killed_goes_on_at_its_layer(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep = tmp_path / "scan.db"
    for tasks in (2, 1):
        assert os.WTERMSIG(killed_after(tasks, llama, keep)) == signal.SIGKILL
    read: list[str] = []
    go_to, bring = StreamedPass.go_to, Stream.bring
    monkeypatch.setattr(StreamedPass, "go_to", lambda one, layer: (read.append(f"go to {layer}"), go_to(one, layer)))
    monkeypatch.setattr(Stream, "bring", lambda one, part, *more: (read.append(one.names[part]), bring(one, part, *more)))
    result = scanned(llama, keep)
    went = [what for what in read[read.index("go to 3") :] if what.startswith(("go to", "layers."))]
    # Layer 3 of the first pass is next; the pass was kept where layer 2 began, so the layers before are not read for it.
    assert [went[1][:9], *(what for what in went if what.startswith("go to"))] == [
        "layers.2.",
        *(f"go to {k}" for k in (3, 0, 1, 2, 3)),
    ]
    undisturbed = lipscope.scan(lipscope.load(llama, ByteTokenizer()), WORDS, lengths=[8, 16], inputs=2)
    assert table_digest([dict(row) for row in undisturbed.rows]) == table_digest([dict(row) for row in result.rows])
    assert not list(tmp_path.glob("*.pass"))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_damaged_state_of_a_pass_costs_time_only(llama: Path, tmp_path: Path) -> None:
    assert os.WTERMSIG(killed_after(3, llama, tmp_path / "scan.db")) == signal.SIGKILL
    kept = tmp_path / "scan.pass"
    kept.write_bytes(kept.read_bytes()[:-7])
    assert len(scanned(llama, tmp_path / "scan.db").rows) == 2 * 2 * LAYERS


def test_scope_model_says_why_not(llama: Path) -> None:
    model = lipscope.load(llama, ByteTokenizer(), stream=True)
    with pytest.raises(ValueError, match="scope model needs all layers at once"):
        lipscope.scan(model, WORDS, lengths=[8], inputs=1, scope="model")


def test_weights_that_do_not_fit_are_streamed(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = sum(file.stat().st_size for file in llama.glob("*.safetensors"))
    for free, streams in ((3 * size + 1000, False), (2 * size, True)):
        monkeypatch.setattr("lipscope.models.stored.free_memory", lambda device=None, free=free: free)
        assert (lipscope.load(llama, stream=None).stream is not None) == streams


@pytest.fixture
def damaged(llama: Path, tmp_path: Path) -> tuple[Path, Path]:
    """A copy of the checkpoint, and the file with layer 3."""
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in llama.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    held = json.loads((copy / "model.safetensors.index.json").read_text())["weight_map"]
    return copy, copy / held["model.layers.3.self_attn.q_proj.weight"]


def test_a_missing_shard_is_refused_by_name(damaged: tuple[Path, Path]) -> None:
    directory, shard = damaged
    shard.unlink()
    with pytest.raises(ValueError, match=f"{shard.name}.*no such file"):
        lipscope.load(directory, stream=True)


@pytest.mark.parametrize("bytes_left", [-100, 40, 3])
def test_a_truncated_shard_is_refused_by_name(damaged: tuple[Path, Path], bytes_left: int) -> None:
    directory, shard = damaged
    shard.write_bytes(shard.read_bytes()[:bytes_left])
    with pytest.raises(ValueError, match=shard.name):
        lipscope.load(directory, stream=True)


def test_wrong_shape_dtype_or_values_are_refused_by_name(damaged: tuple[Path, Path]) -> None:
    directory, shard = damaged
    good, name = load_file(shard), "model.layers.3.self_attn.q_proj.weight"
    for wrong, words in (
        (good[name][:-1], r"has the shape \(47, 48\), but config.json asks for \(48, 48\)"),
        (good[name].to(torch.int64), "not as floating-point numbers"),
        (good[name].to(torch.int8), "is stored as I8"),
        (good[name].clone().fill_(float("nan")), "holds NaN or infinite values"),
        (None, "does not hold layers.3.self_attn.q_proj.weight"),
    ):
        tensors = {k: v for k, v in (good | {name: wrong}).items() if v is not None}
        save_file(tensors, shard)
        with pytest.raises(ValueError, match=words) as refused:
            lipscope.load(directory, stream=True)
        assert str(directory) in str(refused.value)


def test_a_checkpoint_that_changes_is_refused_at_that_layer_and_rows_stay(
    damaged: tuple[Path, Path], tmp_path: Path
) -> None:
    directory, shard = damaged
    model = lipscope.load(directory, ByteTokenizer(), stream=True)
    rows: list[str] = []

    def told(done: int, total: int, what: str) -> None:
        rows.append(what)
        if what == "n = 8, layer 1":
            shard.write_bytes(shard.read_bytes()[:-100])

    with pytest.raises(ValueError, match=f"{shard.name} changed while it was read"):
        lipscope.scan(model, WORDS, lengths=[8], inputs=1, store=tmp_path / "scan.db", progress=told)
    with Store(tmp_path / "scan.db") as store:
        # The file also holds a part of layer 2.
        assert [row["layer"] for row in store.rows()] == [0, 1]


def test_what_cannot_be_streamed_says_so(tmp_path: Path, llama: Path) -> None:
    with pytest.raises(ValueError, match="cannot be streamed"):
        lipscope.load("gpt2-mini", stream=True)
    with pytest.raises(ValueError, match="a pickle cannot be streamed"):
        lipscope.load(llama, stream=True, allow_pickle=True)
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    (pickled / "config.json").write_bytes((llama / "config.json").read_bytes())
    torch.save({}, pickled / "pytorch_model.bin")
    with pytest.raises(ValueError, match="holds its weights as a pickle"):
        lipscope.load(pickled, stream=True)


def test_no_room_on_disk_ends_the_scan_with_the_files_name(llama: Path) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("needs /dev/full")
    model = lipscope.load(llama, ByteTokenizer(), stream=True)
    assert model.stream is not None
    model.stream.keep = Path("/dev/shm/no/such/place/state.pass")
    with pytest.raises(OSError, match="state"):
        model.record(input_ids=torch.arange(8)[None])[1].sigma()


def test_layers_of_a_hybrid_have_the_numbers_that_the_model_gives_them(tmp_path: Path) -> None:
    kinds = ["conv", "full_attention", "conv", "conv", "full_attention"]
    size = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 260,
    }
    torch.manual_seed(0)
    made = transformers.Lfm2Model(transformers.Lfm2Config(**size, num_hidden_layers=len(kinds), layer_types=kinds))
    made.save_pretrained(tmp_path / "hybrid")
    ids = torch.arange(6)[None]
    whole, streamed = (lipscope.load(tmp_path / "hybrid", stream=stream) for stream in (False, True))
    for model in (whole, streamed):
        assert [layer.index for layer in model.layers] == [1, 4]
        assert [row["layer"] for row in model.record(input_ids=ids).rows()] == [1, 4]
        assert (model.layer(4).name, model.layer(-1).name) == ("layers.4", "layers.4")
        # Those without attention are listed, and measured when they are asked for.
        assert [layer.index for layer in model.every if layer.mixer == "Lfm2ShortConv"] == [0, 2, 3]
        assert [row["layer"] for row in model.record(input_ids=ids).rows(layers=[0, 4], scope="block")] == [0, 4]
        with pytest.raises(ValueError, match="layer must lie between 0 and 4, got 5"):
            model.layer(5)
    # Number 4 is the block that the model itself runs as its last one.
    block = whole.record(input_ids=ids)[4]
    assert block.layer.block is whole.model.layers[4]
    assert rows_of(streamed, "block") == rows_of(whole, "block")


def test_a_plan_reads_headers_only_and_says_what_scan_would_do(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def reading(*_: Any) -> None:
        raise AssertionError("a plan reads no weights")

    monkeypatch.setattr("lipscope.models.stored.Checkpoint.read", reading)
    for free, way in ((1 << 40, "in memory"), (1000, "streamed")):
        monkeypatch.setattr("lipscope.models.stored.free_memory", lambda device=None, free=free: free)
        told = command.run("plan", str(llama), "--lengths", "16,64")
        assert told.returncode == 0, told.stderr
        words = " ".join(told.stdout.split())
        count = sum(p.numel() for p in made("llama").model.parameters())
        assert f"{count:,} parameters in {LAYERS} layers" in words
        assert f"lipscope scan takes it {way}" in words
        assert words.count("in memory") == 2 + (way == "in memory")


def test_a_plan_is_made_of_every_model_that_is_scanned(tmp_path: Path) -> None:
    mamba = transformers.MambaConfig(hidden_size=32, num_hidden_layers=3, vocab_size=260, state_size=8)
    transformers.MambaForCausalLM(mamba).save_pretrained(tmp_path / "mamba")
    saved(tmp_path / "t5", "t5")
    encoder = made("t5").encoder
    for words, expected in (
        (["mamba"], "in 3 layers"),
        (["t5", "--part", "encoder"], f"{sum(p.numel() for p in encoder.parameters()):,} parameters in {LAYERS} layers"),
    ):
        told = command.run("plan", str(tmp_path / words[0]), *words[1:])
        assert told.returncode == 0, told.stderr
        assert expected in " ".join(told.stdout.split())


def test_a_plan_refuses_what_a_scan_would_refuse(damaged: tuple[Path, Path], tmp_path: Path) -> None:
    directory, shard = damaged
    saved(tmp_path / "t5", "t5")
    for words, expected in (
        (["gpt2-mini"], "lipscope describe gpt2-mini"),
        ([str(tmp_path / "t5")], "say which part"),
        ([str(directory), "--inputs", "0"], "inputs must be at least 1, got 0"),
        ([str(directory), "--device", "nonsense"], "device must be auto, cpu"),
    ):
        told = command.run("plan", *words)
        assert told.returncode == 2
        assert expected in " ".join(told.stderr.split())
    name = "model.layers.3.self_attn.q_proj.weight"
    good = load_file(shard)
    save_file(good | {name: good[name][:-1].contiguous()}, shard)
    assert f"{shard.name}: {name} has the shape (47, 48)" in " ".join(command.run("plan", str(directory)).stderr.split())
    save_file({k: v for k, v in good.items() if k != name}, shard)
    told = " ".join(command.run("plan", str(directory)).stdout.split())
    assert "does not hold layers.3.self_attn.q_proj.weight" in told
    assert "streamed " not in told.replace("cannot be streamed", "")


def test_a_gpu_has_to_hold_the_weights_too(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda:0")
    wide = 2 * sum(t.size for t in Checkpoint(llama).tensors.values())
    for free, expected in ((wide + 1, True), (wide, False)):
        monkeypatch.setattr("torch.cuda.mem_get_info", lambda device, free=free: (free, 1 << 40))
        assert fits(llama, device=gpu) == expected
    assert fits(llama)


def test_larger_models_and_longer_inputs_are_planned_with_more() -> None:
    small, large = (made("llama", hidden_size=width).model for width in (64, 128))
    for way in ("in memory", "streamed"):
        cases = [(model, n) for model in (small, large) for n in (64, 4096)]
        planned = [ways(model, sum(p.numel() * 2 for p in model.parameters()), n, 1, 1e9)[way] for model, n in cases]
        for less, more in ((0, 1), (0, 2), (1, 3), (2, 3)):
            assert planned[less][0] < planned[more][0]
            assert planned[less][1] < planned[more][1]


def test_as_many_inputs_share_a_pass_as_are_asked_for(llama: Path, tmp_path: Path) -> None:
    """Streamed, every pass reads the weights: the number of inputs in one is worth choosing."""
    model = lipscope.load(llama, ByteTokenizer(), stream=True)
    together: list[int] = []
    recorded = model.record

    def recording(**given: Any) -> Any:
        together.append(len(given["input_ids"]))
        return recorded(**given)

    model.record = recording  # type: ignore[method-assign]
    rows = [lipscope.scan(model, WORDS, layers=[0], lengths=[8], inputs=3, batch_size=size).rows for size in (0, 2, 1)]
    assert together == [3, 2, 1, 1, 1, 1]
    for one, other in zip(rows[0], rows[2], strict=True):
        assert one["estimate"] == pytest.approx(other["estimate"], rel=1e-3)
    with pytest.raises(ValueError, match="batch_size must be a whole number of at least 0"):
        lipscope.scan(model, WORDS, lengths=[8], batch_size=-1)
    told = command.run("scan", "gpt2-mini", "--batch-size", "0")
    assert "batch_size must be at least 1, got 0" in told.stderr
