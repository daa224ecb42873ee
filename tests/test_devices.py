"""Devices: those that do not exist are refused, and on a GPU, where there is one, the numbers are those of the CPU."""

from __future__ import annotations

from pathlib import Path

import accelerate
import pytest
import torch
import transformers
from typer.testing import CliRunner

import lipscope
from cases import EXTRAS, layer, masks, random
from elsewhere import another_device, moved
from lipscope.attention.operators import AttentionOperator
from lipscope.bounds.registry import least
from lipscope.cli.main import app
from lipscope.models.model import Model
from lipscope.models.stored import Checkpoint
from lipscope.models.streaming import Stream, skeleton

GPUS = ["cuda"] * torch.cuda.is_available() + ["mps"] * torch.backends.mps.is_available()


def model() -> transformers.GPT2Model:
    torch.manual_seed(0)
    return transformers.GPT2Model(
        transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=50, n_positions=32)
    ).eval()


@pytest.mark.parametrize("device", ["cuda:7", "mps:3", "nonsense", "xpu", "meta"])
def test_a_device_that_does_not_exist_is_refused(device: str) -> None:
    with pytest.raises(ValueError, match="device"):
        lipscope.load(model(), device=device)


def test_auto_and_cpu_leave_the_callers_model_where_it_is() -> None:
    own = model()
    assert lipscope.load(own, device="cpu").model is own
    assert lipscope.load(own, device="auto").device.type == (GPUS or ["cpu"])[0]
    assert next(own.parameters()).device.type == "cpu"


@pytest.mark.parametrize("place", ["disk", "cpu"])
def test_weights_that_accelerate_keeps_elsewhere_are_brought_in(place: str, tmp_path: Path) -> None:
    model().save_pretrained(tmp_path / "saved")
    ids = torch.arange(6)[None]
    expected = lipscope.load(tmp_path / "saved").record(input_ids=ids).rows(scope="block")
    if place == "disk":
        where = {"wte": "cpu", "wpe": "cpu", "h.0": "cpu", "h.1": "disk", "ln_f": "disk"}
        spread = transformers.GPT2Model.from_pretrained(tmp_path / "saved", device_map=where, offload_folder=tmp_path).eval()
    else:
        spread = accelerate.cpu_offload(model(), execution_device=torch.device("cpu"))
    away = [name for name, p in spread.named_parameters() if p.is_meta]
    found = lipscope.load(spread).record(input_ids=ids).rows(scope="block")
    assert [row["estimate"] for row in found] == [row["estimate"] for row in expected]
    # The caller's model stays as it is.
    assert away
    assert [name for name, p in spread.named_parameters() if p.is_meta] == away


def test_options_of_the_hub_are_refused_elsewhere(tmp_path: Path) -> None:
    model().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="revision is for a model of the hub"):
        lipscope.load(tmp_path, revision="main")
    with pytest.raises(ValueError, match="names code of the hub"):
        lipscope.load(tmp_path, attn_implementation="somebody/kernel")
    for word, message in (("somebody/kernel", "names code of the hub"), ("none", "--attn-implementation 'none' is none of")):
        done = CliRunner().invoke(app, ["check", str(tmp_path), "--n", "4", "--attn-implementation", word])
        assert (done.exit_code, message in " ".join(done.stderr.split())) == (2, True)
    plain, eager = lipscope.load(tmp_path), lipscope.load(tmp_path, attn_implementation="eager")
    assert eager.model.config._attn_implementation == "eager"
    ids = torch.arange(6)[None]
    assert torch.equal(plain.record(input_ids=ids)[1].sigma().estimate, eager.record(input_ids=ids)[1].sigma().estimate)


@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize("mask", list(masks()))
def test_products_need_no_tensor_of_the_cpu(mask: str, tiled: bool) -> None:
    for extras in ("plain", "everything", "turned", "no-out"):
        here = layer(dtype=torch.float32, extras=EXTRAS[extras]).with_mask(masks()[mask][0])
        X = random(3, 5, here.width, seed=1, dtype=torch.float32)
        expected = AttentionOperator.at(here, X, tiled=tiled)
        u, g = (random(3, size, seed=2, dtype=torch.float32) for size in reversed(expected.shape))
        with another_device() as device:
            operator = AttentionOperator.at(here.to(device=device), X.to(device), tiled=tiled)
            found = operator.matvec(u.to(device)), operator.rmatvec(g.to(device))
            assert {product.device for product in found} == {device}
            image, pulled = (product.cpu() for product in found)
        assert torch.equal(image, expected.matvec(u))
        assert torch.equal(pulled, expected.rmatvec(g))


@pytest.mark.parametrize("mask", list(masks()))
def test_solvers_certificates_and_bounds_need_no_tensor_of_the_cpu(mask: str) -> None:
    here = layer(dtype=torch.float32, extras="biases").with_mask(masks()[mask][0])
    X = random(3, 5, here.width, seed=1, dtype=torch.float32)
    for scope in ("attention", "head"):
        expected = lipscope.local_lipschitz(here, X, scope=scope, certificate="tight")
        with another_device() as device:
            found = lipscope.local_lipschitz(here.to(device=device), X.to(device), scope=scope, certificate="tight")
            assert [found.estimate.tolist(), found.upper.tolist(), found.lower.tolist()] == [
                expected.estimate.tolist(),
                expected.upper.tolist(),
                expected.lower.tolist(),
            ]
    bound = least("refined", here, 2.0, 5)
    with another_device() as device:
        assert least("refined", here.to(device=device), 2.0, 5) == pytest.approx(bound, rel=1e-12)


@pytest.mark.parametrize("scope", ["attention", "head", "norm+attention", "attention+residual", "block", "model"])
def test_a_model_needs_no_tensor_of_the_cpu(scope: str) -> None:
    ids = torch.arange(6)[None]
    expected = lipscope.load(model()).record(input_ids=ids).rows(scope=scope)
    with another_device() as device:
        found = lipscope.load(moved(model())).record(input_ids=ids.to(device)).rows(scope=scope)
    for row, same in zip(found, expected, strict=True):
        for name in row.keys() - {"seconds"}:
            # What rounding may do to a map that is differentiated is drawn, there in other pieces.
            near = 1e-5 if name in ("lower", "upper") else 1e-9
            assert row[name] == (pytest.approx(same[name], rel=near) if isinstance(same[name], float) else same[name])


def test_a_streamed_model_needs_no_tensor_of_the_cpu(tmp_path: Path) -> None:
    model().save_pretrained(tmp_path)
    ids, checkpoint = torch.arange(6)[None], Checkpoint(tmp_path)
    expected = lipscope.load(tmp_path, stream=True).record(input_ids=ids).rows(scope="block")
    made = skeleton(checkpoint, None)
    with another_device() as device:
        streamed = Model(made, stream=Stream(made, made, checkpoint, device))
        assert streamed.device == device
        found = streamed.record(input_ids=ids.to(device)).rows(scope="block")
    for row, same in zip(found, expected, strict=True):
        assert row["estimate"] == pytest.approx(same["estimate"], rel=1e-9)


def test_the_device_that_is_not_there_refuses_tensors_of_the_cpu() -> None:
    with another_device() as device:
        there = torch.ones(3, device=device)
        for stray in (
            lambda: there + torch.ones(3),
            lambda: torch.eye(3) @ there,
            lambda: torch.cat([there, torch.ones(1)]),
        ):
            with pytest.raises(RuntimeError, match="a CPU tensor of shape"):
                stray()
        with pytest.raises(RuntimeError, match="a generator of the CPU"):
            torch.randn(3, generator=torch.Generator(), device=device)
        assert (there + torch.tensor(1.0)).tolist() == [2.0, 2.0, 2.0]


@pytest.mark.gpu
@pytest.mark.skipif(not GPUS, reason="needs a GPU")
@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize("mask", list(masks()))
def test_products_on_a_gpu_are_those_of_the_cpu(mask: str, tiled: bool) -> None:
    here = layer(dtype=torch.float32).with_mask(masks()[mask][0])
    X = random(3, 5, here.width, seed=1, dtype=torch.float32)
    u = random(3, X[0].numel(), seed=2, dtype=torch.float32)
    expected = AttentionOperator.at(here, X, tiled=tiled).matvec(u)
    found = AttentionOperator.at(here.to(device=torch.device(GPUS[0])), X.to(GPUS[0]), tiled=tiled).matvec(u.to(GPUS[0]))
    assert found.device.type == GPUS[0]
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not GPUS, reason="needs a GPU")
@pytest.mark.parametrize("stream", [False, True])
def test_a_model_on_a_gpu_is_measured_like_one_on_the_cpu(tmp_path: Path, stream: bool) -> None:
    model().save_pretrained(tmp_path)
    ids = torch.arange(8)[None]
    expected = lipscope.load(tmp_path).record(input_ids=ids).rows(scope="block")
    there = lipscope.load(tmp_path, device=GPUS[0], stream=stream)
    assert there.device.type == GPUS[0]
    for row, cpu in zip(there.record(input_ids=ids).rows(scope="block"), expected, strict=True):
        assert row["estimate"] == pytest.approx(cpu["estimate"], rel=1e-3)
