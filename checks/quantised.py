"""σ of models quantised by the libraries themselves, against the same layers de-quantised by hand, as a table.

    python checks/quantised.py

None of the libraries is needed by lipscope or its tests; each is run where it is installed, and left out where it is not.
The last columns are relative, the largest of two layers and two scopes.
"""

from __future__ import annotations

import copy
import importlib.util
import tempfile
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Any

import torch
import transformers as tf
from torch import Tensor, nn

import lipscope

IDS = torch.arange(3, 15)[None]


def tiny() -> Any:
    """A Llama of two layers, random weights."""
    torch.manual_seed(0)
    model = tf.LlamaModel(
        tf.LlamaConfig(
            vocab_size=96, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            intermediate_size=128, max_position_embeddings=64,
        )
    )  # fmt: skip
    for p in model.parameters():
        if p.ndim == 2:
            p.data = torch.randn(p.shape) * 0.1
    return model.eval()


def _torchao(kind: str, **settings: Any) -> Any:
    import torchao.quantization as ao

    return tf.TorchAoConfig(getattr(ao, kind)(**settings))


def _torchao_4() -> Any:
    from torchao.quantization.granularity import PerGroup

    return _torchao("IntxWeightOnlyConfig", weight_dtype=torch.int4, granularity=PerGroup(32))


def _hqq(linear: nn.Linear, bits: int) -> nn.Module:
    from hqq.core.quantize import BaseQuantizeConfig, HQQLinear

    return HQQLinear(linear, BaseQuantizeConfig(nbits=bits, group_size=64), compute_dtype=torch.float32, device="cpu")


def _bitsandbytes(layer: Any) -> Tensor:
    import bitsandbytes as bnb

    if isinstance(layer, bnb.nn.Linear4bit):
        return bnb.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    return layer.weight.data * layer.weight.SCB[:, None] / 127


def _itself(layer: Any) -> Tensor:
    return layer.weight.dequantize()


# Package, name, how a layer is de-quantised by hand, and what transformers is asked for, or what becomes of a linear layer.
SCHEMES: list[tuple[str, str, Callable[[Any], Tensor], Callable[[], Any] | None, Callable[[Any], nn.Module] | None]] = [
    ("bitsandbytes", "8 bits", _bitsandbytes, lambda: tf.BitsAndBytesConfig(load_in_8bit=True), None),
    ("bitsandbytes", "4 bits, nf4", _bitsandbytes,
     lambda: tf.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"), None),
    ("torchao", "8 bits", _itself, lambda: _torchao("Int8WeightOnlyConfig"), None),
    ("torchao", "8 bits, activations too", _itself, lambda: _torchao("Int8DynamicActivationInt8WeightConfig"), None),
    ("torchao", "4 bits, groups of 32", _itself, _torchao_4, None),
    ("optimum-quanto", "8 bits", _itself, lambda: tf.QuantoConfig(weights="int8"), None),
    ("hqq", "8 bits", lambda layer: layer.dequantize(), None, lambda linear: _hqq(linear, 8)),
    ("hqq", "4 bits", lambda layer: layer.dequantize(), None, lambda linear: _hqq(linear, 4)),
]  # fmt: skip


def linear_layers(model: nn.Module) -> list[str]:
    """Names of the linear layers."""
    return [name for name, part in model.named_modules() if isinstance(part, nn.Linear)]


def sigmas(model: nn.Module) -> Tensor:
    """σ of both layers at scopes attention and block."""
    recorded = lipscope.load(model, dtype=torch.float64).record(input_ids=IDS)
    return torch.cat([recorded[k].sigma(scope).estimate for k in (0, 1) for scope in ("attention", "block")])


def rows() -> Iterator[list[str]]:
    """A row per scheme of an installed library."""
    full = tiny()
    names, before = linear_layers(full), sigmas(full)
    with tempfile.TemporaryDirectory() as directory:
        full.save_pretrained(directory)
        for package, scheme, dense, config, make in SCHEMES:
            if importlib.util.find_spec(package.replace("-", ".").partition(".")[0]) is None:
                continue
            if config is not None:
                packed = tf.AutoModel.from_pretrained(directory, quantization_config=config(), device_map="cpu").eval()
            else:
                packed = copy.deepcopy(full)
                for name in names:
                    assert make is not None
                    packed.set_submodule(name, make(packed.get_submodule(name)))
            hand = copy.deepcopy(full)
            with torch.no_grad():
                for name in names:
                    hand.get_submodule(name).weight.copy_(dense(packed.get_submodule(name)))
            found, expected = sigmas(packed), sigmas(hand)
            apart, moved = (float((one / expected - 1).abs().max()) for one in (found, before))
            yield [f"{package} {metadata.version(package)}", scheme, f"{apart:.1e}", f"{moved:.1%}"]


def main() -> None:
    """Print the table."""
    print("| library | weights | σ away from that of the layers de-quantised by hand | σ moved by quantisation |")
    print("|---|---|---|---|")
    for row in rows():
        print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
