"""Quantised weights: σ is that of the same layers de-quantised by hand, and what cannot be de-quantised is refused.

GGUF (8 and 4 bits) and torch's own 8-bit layers are run for real; the protocols of HQQ, torchao, GPTQ and AWQ by modules
that follow them. ``checks/quantised.py`` runs the libraries themselves where they are installed.
"""

from __future__ import annotations

import copy
import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lipscope
from lipscope.models.model import Model
from lipscope.runs.work import model_fingerprint
from lipscope.studies.sensitivity import sensitivity
from model_families import FAMILIES

IDS = torch.arange(3, 13)[None]


def llama(width: int = 64) -> nn.Module:
    from transformers import LlamaConfig, LlamaModel

    torch.manual_seed(0)
    model = LlamaModel(
        LlamaConfig(
            vocab_size=64, hidden_size=width, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            intermediate_size=width, max_position_embeddings=32,
        )
    )  # fmt: skip
    for p in model.parameters():
        if p.ndim == 2:
            p.data = torch.randn(p.shape) * 0.3
    return model.eval()


class Fake(nn.Module):
    """A linear layer with whole numbers of some bits, one scale per row, in the manner of a library."""

    def __init__(self, linear: nn.Linear, bits: int) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        top = 2 ** (bits - 1) - 1
        scales = linear.weight.detach().abs().amax(1, keepdim=True) / top
        self.register_buffer("scales", scales)
        self.register_buffer("qweight", (linear.weight.detach() / scales).round().to(torch.int8))
        self.bias = linear.bias

    def dense(self) -> Tensor:
        return self.qweight.to(self.scales.dtype) * self.scales

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:  # without a derivative, like a kernel of integers
        return nn.functional.linear(x, self.dense(), self.bias)


class Hqq(Fake):
    """Its module has a ``dequantize``."""

    def dequantize(self) -> Tensor:
        return self.dense()


class Gptq(Fake):
    """It has none, and takes half precision only."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype != torch.float16:
            raise RuntimeError("half precision only")
        return super().forward(x.float()).half()


class PackedTensor(torch.Tensor):
    """A weight that is packed and looks like floating point, as those of torchao do."""

    fake: Fake

    @classmethod
    def of(cls, fake: Fake) -> PackedTensor:
        made = torch.zeros(fake.qweight.shape).as_subclass(cls)
        made.fake = fake
        return made

    def dequantize(self) -> Tensor:
        return self.fake.dense()

    def __deepcopy__(self, memo: Any) -> PackedTensor:
        raise RuntimeError("cannot be copied")  # those of quanto cannot

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.detach:
            return args[0]
        if func is nn.functional.linear:
            return func(*(a.dequantize() if isinstance(a, PackedTensor) else a for a in args))
        return super().__torch_function__(func, types, args, kwargs or {})


def torchao(linear: nn.Linear, bits: int, kind: type[Fake] = Fake) -> nn.Module:
    made = copy.deepcopy(linear)
    made.weight = nn.Parameter(PackedTensor.of(kind(linear, bits)), requires_grad=False)
    return made


def torch_own(linear: nn.Linear, bits: int) -> nn.Module:
    quantised = torch.ao.quantization.quantize_dynamic(nn.Sequential(linear), {nn.Linear}, dtype=torch.qint8)
    return quantised[0]


def by_hand(part: nn.Module) -> Tensor:
    if isinstance(part, Fake):
        return part.dense()
    weight: Any = part.weight
    return weight.dequantize() if isinstance(weight, Tensor) else weight().dequantize()


def swapped(model: nn.Module, make: Callable[[nn.Linear], nn.Module]) -> nn.Module:
    """A copy with every linear layer made anew."""
    made = copy.deepcopy(model)
    for name, part in list(made.named_modules()):
        if isinstance(part, nn.Linear):
            made.set_submodule(name, make(part))
    return made.eval()


def plain(quantised: nn.Module) -> Callable[[nn.Linear], nn.Module]:
    parts = iter(part for part in quantised.modules() if hasattr(part, "in_features"))

    def make(linear: nn.Linear) -> nn.Module:
        part = next(parts)
        linear.weight.data = by_hand(part).half().float() if isinstance(part, Gptq) else by_hand(part).clone()
        return linear

    return make


def sigmas(model: Model, scope: str) -> Tensor:
    return torch.cat([model.record(input_ids=IDS)[layer].sigma(scope).estimate for layer in (0, 1)])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("make", "bits"), [(torch_own, 8), (Hqq, 8), (Hqq, 4), (torchao, 8), (torchao, 4), (Gptq, 4)])
@pytest.mark.parametrize("family", ["llama", "bert"])
def test_sigma_is_that_of_the_layers_dequantised_by_hand(family: str, make: Any, bits: int) -> None:
    full = llama() if family == "llama" else FAMILIES["bert"]().float()
    packed = swapped(full, lambda linear: make(linear, bits))
    hand = swapped(full, plain(packed))
    measured, expected = lipscope.load(packed), lipscope.load(hand)
    assert "de-quantised from" in measured.notes[-1]
    assert expected.notes == ()
    close = {"rtol": 1e-6, "atol": 0.0}
    for scope in ("attention", "block"):
        torch.testing.assert_close(sigmas(measured, scope), sigmas(expected, scope), **close)
    assert (measured.record(input_ids=IDS)[1].attention is None) == (expected.record(input_ids=IDS)[1].attention is None)
    double = lipscope.load(packed, dtype=torch.float64)
    torch.testing.assert_close(sigmas(double, "block"), sigmas(lipscope.load(hand, dtype=torch.float64), "block"), **close)
    assert len({model_fingerprint(one) for one in (measured, lipscope.load(packed), expected)}) == 2


def test_models_that_differ_in_packed_weights_alone_are_told_apart() -> None:
    first = swapped(llama(), lambda linear: Hqq(linear, 4))
    second = copy.deepcopy(first)
    part = next(part for part in second.modules() if isinstance(part, Fake))
    part.scales *= 2
    assert model_fingerprint(lipscope.load(first)) != model_fingerprint(lipscope.load(second))


@pytest.mark.parametrize("in_tensors", [False, True])
def test_one_layer_at_a_time(in_tensors: bool) -> None:
    """Weights live while their layer is called, and in the graph of the layer that is measured: never all of them."""
    living: weakref.WeakKeyDictionary[torch.UntypedStorage, int] = weakref.WeakKeyDictionary()
    most: list[int] = []

    class Counting(Hqq):
        def dense(self) -> Tensor:
            made = super().dense()
            living[made.untyped_storage()] = id(self)
            most.append(len(set(living.values())))
            return made

    def make(linear: nn.Linear) -> nn.Module:
        return torchao(linear, 8, Counting) if in_tensors else Counting(linear, 8)

    model = lipscope.load(swapped(llama(), make))
    assert max(most) <= 8  # the linear layers of one block, of 14 in all, and one that is being made
    most.clear()
    recorded = model.record(input_ids=IDS)
    assert max(most) == 1
    recorded[1].sigma("block")
    assert max(most) <= 8


class Transposed(Hqq):
    def dequantize(self) -> Tensor:
        return self.dense().mT


class Damaged(Hqq):
    def dequantize(self) -> Tensor:
        return torch.full_like(self.dense(), torch.nan)


class Silent(Gptq):
    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("needs CUDA")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (Transposed, r"layers\.0\.self_attn\.q_proj .*differs by"),
        (Damaged, "q_proj: the quantised weights hold NaN"),
        (Silent, r"q_proj .* cannot be had: its kernel does not run here .*needs CUDA"),
    ],
)
def test_what_is_not_the_layer_is_refused(make: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        lipscope.load(swapped(llama(), lambda linear: make(linear, 8)))


def test_errors_of_the_weights_are_those_of_the_dequantised_layers() -> None:
    packed = swapped(llama(), lambda linear: Hqq(linear, 8))
    hand = swapped(llama(), plain(packed))
    found, expected = (sensitivity(lipscope.load(one), input_ids=IDS, perturb="bf16-weights") for one in (packed, hand))
    assert [row["predicted"] for row in found.rows] == pytest.approx([row["predicted"] for row in expected.rows])
    assert max(row["predicted"] for row in expected.rows) > 0


def test_a_saved_model_that_needs_a_library(tmp_path: Path) -> None:
    FAMILIES["bert"]().float().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "gptq", "bits": 4}}))
    with pytest.raises(ValueError, match=r"are quantised \(gptq\): .*requires"):
        lipscope.load(tmp_path)
    with pytest.raises(ValueError, match=r"are quantised \(gptq\), and not streamed"):
        lipscope.load(tmp_path, stream=True)


NAMES = {
    "embed_tokens": "token_embd", "norm": "output_norm", "input_layernorm": "attn_norm", "q_proj": "attn_q",
    "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output", "post_attention_layernorm": "ffn_norm",
    "gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down",
}  # fmt: skip


def write_gguf(file: Path, model: Any, kind: gguf.GGMLQuantizationType) -> dict[str, np.ndarray]:
    """A GGUF file of the model, and what its weights are when de-quantised by hand."""
    writer, c = gguf.GGUFWriter(file, "llama"), model.config
    writer.add_context_length(32)
    writer.add_embedding_length(c.hidden_size)
    writer.add_block_count(c.num_hidden_layers)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_key_value_heads)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(c.vocab_size)
    dense = {}
    for name, p in model.state_dict().items():
        parts = name.removesuffix(".weight").split(".")
        target = f"blk.{parts[1]}.{NAMES[parts[-1]]}.weight" if parts[0] == "layers" else f"{NAMES[parts[-1]]}.weight"
        data = p.numpy()
        heads = {"q_proj": c.num_attention_heads, "k_proj": c.num_key_value_heads}.get(parts[-1])
        if heads:  # the file has the two halves of a rotated head interleaved
            data = data.reshape(heads, 2, -1, data.shape[1]).swapaxes(1, 2).reshape(data.shape)
        dense[name] = data
        if p.ndim == 2:
            packed = gguf.quants.quantize(np.ascontiguousarray(data), kind)
            writer.add_tensor(target, packed, raw_dtype=kind)
            dense[name] = gguf.quants.dequantize(packed, kind)
            if heads:
                dense[name] = dense[name].reshape(heads, -1, 2, data.shape[1]).swapaxes(1, 2).reshape(data.shape)
        else:
            writer.add_tensor(target, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return dense


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_gguf_files(tmp_path: Path, kind: str) -> None:
    model = llama()
    dense = write_gguf(tmp_path / "tiny.gguf", model, gguf.GGMLQuantizationType[kind])
    found = lipscope.load(tmp_path / "tiny.gguf")
    assert found.name == "tiny"
    assert found.notes == (f"weights de-quantised from GGUF {kind}",)
    hand = copy.deepcopy(model)
    hand.load_state_dict({name: torch.from_numpy(data) for name, data in dense.items()})
    torch.testing.assert_close(sigmas(found, "block"), sigmas(lipscope.load(hand), "block"), rtol=1e-6, atol=0.0)


def test_a_damaged_gguf_file(tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF" + bytes(64))
    with pytest.raises(ValueError, match="is no GGUF file, or damaged"):
        lipscope.load(tmp_path / "tiny.gguf")
