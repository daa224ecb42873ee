"""Clips, images and features: σ against a dense Jacobian, where tokens lie, and one clear line for what cannot be read."""

from __future__ import annotations

import json
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from PIL import Image
from safetensors.torch import save_file
from typer.testing import CliRunner

import lipscope
from lipscope.cli.main import app
from lipscope.models.media import read_wav, signals
from lipscope.models.tokens import token_view
from lipscope.report.page import page_view
from lipscope.report.run_charts import where_chart
from model_families import FAMILIES, enlarge

RATE = 16_000


def write_wav(path: Path, seconds: float, *, rate: int = RATE, channels: int = 1, width: int = 2) -> np.ndarray[Any, Any]:
    """A file with noise, and its samples."""
    samples = np.random.default_rng(0).uniform(-0.5, 0.5, round(seconds * rate))
    whole = np.round(samples * (1 << (8 * width - 1))).astype(np.int64) + (128 if width == 1 else 0)
    data = b"".join(int(v).to_bytes(width, "little", signed=width > 1) * channels for v in whole)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(data)
    return samples


def whisper() -> lipscope.Model:
    hears = tf.WhisperFeatureExtractor(feature_size=8, chunk_length=1, hop_length=160 * 100 // 12 // 8 * 8, n_fft=400)
    hears.n_samples, hears.nb_max_frames = hears.hop_length * 12, 12
    return lipscope.load(FAMILIES["whisper_encoder"](), processor=hears)


def wav2vec2() -> lipscope.Model:
    return lipscope.load(FAMILIES["wav2vec2"](), processor=tf.Wav2Vec2FeatureExtractor())


def vit(**more: Any) -> lipscope.Model:
    return lipscope.load(FAMILIES["vit"](), processor=tf.ViTImageProcessorPil(size={"height": 8, "width": 8}), **more)


def towers() -> Any:
    size = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
    text, seen = size | {"vocab_size": 50, "max_position_embeddings": 16}, size | {"image_size": 8, "patch_size": 4}
    return enlarge(tf.CLIPModel(tf.CLIPConfig(text_config=text, vision_config=seen)))


def photo(path: Path) -> Path:
    Image.fromarray(np.random.default_rng(1).integers(0, 255, (20, 30, 3), dtype=np.uint8)).save(path)
    return path


def dense(layer: Any) -> float:
    """σ of the attention of a recorded layer, by torch's own Jacobian in float64."""
    X = layer.tokens()[:1]
    J = torch.autograd.functional.jacobian(layer.map("attention"), X)
    return float(torch.linalg.matrix_norm(J.reshape(X.numel(), X.numel()), 2))


@pytest.mark.parametrize("kind", ["whisper", "wav2vec2", "vit", "clip", "dinov2"])
def test_sigma_is_that_of_a_dense_jacobian(kind: str, tmp_path: Path) -> None:
    if kind in ("whisper", "wav2vec2"):
        write_wav(tmp_path / "clip.wav", 0.004 if kind == "wav2vec2" else 0.1)
        handle, given = {"whisper": whisper, "wav2vec2": wav2vec2}[kind](), {"audio": tmp_path / "clip.wav"}
    else:
        sees = tf.ViTImageProcessorPil(size={"height": 8, "width": 8})
        config: Any = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 8, "patch_size": 4}
        if kind == "vit":
            handle = vit()
        elif kind == "clip":
            handle = lipscope.load(towers(), part="vision", processor=sees)
        else:
            handle = lipscope.load(enlarge(tf.Dinov2Model(tf.Dinov2Config(**config))), processor=sees)
        given = {"image": photo(tmp_path / "photo.png")}
    recorded = handle.record(**given)
    result = lipscope.scan(handle, **given, inputs=1)  # type: ignore[arg-type]
    assert len(result.rows) == 2
    for row in result.rows:
        sigma = dense(recorded[row["layer"]])
        assert row["lower"] * (1 - 1e-9) <= sigma <= row["upper"] * (1 + 1e-9)
        assert row["estimate"] == pytest.approx(sigma, rel=1e-3)
        assert str(next(iter(given.values()))) in result.about["text"]


def test_towers_find_the_processor_beside_their_weights(tmp_path: Path) -> None:
    towers().float().save_pretrained(tmp_path / "clip")
    sees = {"size": {"height": 8, "width": 8}, "image_processor_type": "ViTImageProcessorPil"}
    (tmp_path / "clip" / "preprocessor_config.json").write_text(json.dumps(sees))
    handle = lipscope.load(tmp_path / "clip", part="vision")
    assert handle.record(image=photo(tmp_path / "photo.png"))[0].tokens().shape == (1, 5, 16)


def test_the_text_tower_reads_text_alone(tmp_path: Path) -> None:
    handle = lipscope.load(towers(), part="text")
    with pytest.raises(ValueError, match=r"image is not for this model: .*reads text"):
        handle.record(image=photo(tmp_path / "photo.png"))
    assert len(handle.record(input_ids=torch.tensor([[1, 2, 3]])).rows()) == 2


def test_content_is_the_address(tmp_path: Path) -> None:
    handle, one, two = vit(), photo(tmp_path / "a.png"), tmp_path / "b.png"
    two.write_bytes(one.read_bytes())
    store = tmp_path / "run.db"
    first = lipscope.scan(handle, image=one, layers=[0], store=store).rows[0]
    again = lipscope.scan(handle, image=two, layers=[0], store=store).rows[0]
    assert first["seconds"] == again["seconds"]  # the same content under another name is not measured again
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(two)
    other = lipscope.scan(handle, image=two, layers=[0], store=store).rows[0]
    assert other["seconds"] != first["seconds"]
    assert other["estimate"] != first["estimate"]


@pytest.mark.parametrize("tokens", [["a"], ["1.2.3 s"], ["row 0, col 9"], ["0.50 s"], ["row 0, col 0"], []])
@pytest.mark.parametrize("influence", [True, False])
def test_views_without_influence_between_tokens_are_shown(tokens: list[str], influence: bool) -> None:
    """One token moves no other, and of very many, or in a file from others, influence may be missing."""
    view = {"tokens": tokens, "energy": [1.0] * len(tokens), "influence": [[1.0]] * len(tokens) if influence else []}
    words, chart = page_view(view | {"layer": 0, "n": 1, "lower": 1, "estimate": 1, "upper": 1, "singular_values": [1.0]})
    assert words["count"] == len(tokens)
    assert chart["panels"]


def test_tokens_know_their_place(tmp_path: Path) -> None:
    [piece] = signals(vit(), image=photo(tmp_path / "photo.png"))
    places = ["row 0, col 0", "row 0, col 1", "row 1, col 0", "row 1, col 1"]
    assert piece.labels == ["extra 0", *places]
    assert piece.n == 5
    view = token_view(vit(), piece, 0).to_dict()
    chart = where_chart(view)
    assert chart is not None
    cells = chart.panels[0].cells  # type: ignore[union-attr]
    assert [cell.value for line in cells for cell in line if cell] == view["energy"][1:]
    write_wav(tmp_path / "clip.wav", 0.01)
    handle = wav2vec2()
    pieces = signals(handle, audio=tmp_path / "clip.wav", lengths=[4, 8], count=2)
    assert [p.n for p in pieces] == [4, 4, 8, 8]
    assert [len(p.inputs["input_values"][0]) for p in pieces] == [19, 19, 35, 35]  # two convolutions of 3, stride 2
    assert pieces[1].start == pytest.approx(19 / RATE)
    assert pieces[0].seconds == 4 / RATE
    heard = token_view(handle, pieces[2], 1).to_dict()
    curve = where_chart(heard)
    assert curve is not None
    assert list(curve.series[0].y) == heard["energy"]
    assert where_chart({"tokens": ["a", "b"], "energy": [0.5, 0.5], "influence": [[1, 0], [1, 1]]}) is None
    with pytest.raises(ValueError, match=r"the clip has 0\.01 s, but 9 disjoint pieces"):
        signals(handle, audio=tmp_path / "clip.wav", lengths=[8], count=9)


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_wav_files_of_every_width(tmp_path: Path, width: int) -> None:
    samples = write_wav(tmp_path / "clip.wav", 0.01, width=width)
    assert np.abs(read_wav(tmp_path / "clip.wav", RATE)[0] - samples).max() <= 2.0 ** (1 - 8 * width) + 1e-7
    sound, note = read_wav(tmp_path / "clip.wav", RATE // 2)
    assert len(sound) == len(samples) // 2
    assert note == "resampled from 16000 to 8000 Hz"


def test_one_clear_line_for_what_cannot_be_read(tmp_path: Path) -> None:
    clip, image, file = tmp_path / "clip.wav", photo(tmp_path / "photo.png"), tmp_path / "x.safetensors"
    write_wav(clip, 0.01, channels=2)
    with pytest.raises(ValueError, match="2 channels"):
        whisper().record(audio=clip)
    clip.write_text("no sound")
    with pytest.raises(ValueError, match=r"no WAV file.*16-bit PCM"):
        whisper().record(audio=clip)
    write_wav(clip, 0.01)
    clip.write_bytes(clip.read_bytes()[:99])
    with pytest.raises(ValueError, match="ends after 27 of its 160 samples: it was cut short"):
        whisper().record(audio=clip)
    write_wav(clip, 0.01, rate=2**31 - 1)
    with pytest.raises(ValueError, match=r"no WAV file .*samples of 16 bits at 2147483647 Hz"):
        whisper().record(audio=clip)
    with pytest.raises(FileNotFoundError, match=r"no file .*--audio"):
        whisper().record(audio=tmp_path / "none.wav")
    with pytest.raises(ValueError, match="no image that can be read"):
        vit().record(image=clip)
    with pytest.raises(ValueError, match=r"image is not for this model: .*hears audio, not text: .* take --audio clip.wav"):
        whisper().record(image=image)
    with pytest.raises(ValueError, match="image is not for this model: gpt2-mini reads text"):
        lipscope.load("gpt2-mini").record(image=image)
    with pytest.raises(ValueError, match=r"hears audio, not text: `lipscope scan` and `tokens` take --audio clip.wav"):
        lipscope.scan(whisper(), "python-docs")
    with pytest.raises(ValueError, match="lengths cannot be chosen here"):
        lipscope.scan(vit(), image=image, lengths=[4])
    with pytest.raises(ValueError, match="exactly one of text, audio, image and features"):
        lipscope.scan(vit(), "python-docs", image=image)
    with pytest.raises(ValueError, match=r"has no processor for --image .*--features"):
        lipscope.load(FAMILIES["vit"]()).record(image=image)
    wrong = {"3, 8, 8": torch.zeros(3, 4, 4), "NaN": torch.full((3, 8, 8), torch.nan), "int": torch.zeros(3, 8, 8).int()}
    for words, tensor in wrong.items():
        save_file({"x": tensor}, file)
        with pytest.raises(ValueError, match=words):
            vit().record(features=file)
    save_file({"x": torch.ones(3, 8, 8)}, file)
    assert vit().record(features=file)[0].tokens().shape[1] == 5


def test_an_image_that_is_a_program_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow hands EPS files to Ghostscript, where that is installed."""
    Image.new("RGB", (8, 8)).save(tmp_path / "photo.png", "EPS")
    monkeypatch.setattr("PIL.EpsImagePlugin.Ghostscript", lambda *_, **__: pytest.fail("the program in the file was run"))
    with pytest.raises(ValueError, match="save it as one of PNG, JPEG"):
        vit().record(image=tmp_path / "photo.png")


def test_the_terminal_shows_a_heat_map_over_the_image_and_a_curve_over_the_clip(tmp_path: Path) -> None:
    size: Any = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    sees = enlarge(tf.ViTModel(tf.ViTConfig(**size, image_size=32, patch_size=4)))
    sees.save_pretrained(tmp_path / "vit")
    tf.ViTImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(tmp_path / "vit")
    asked = ["tokens", str(tmp_path / "vit"), "--image", str(photo(tmp_path / "photo.png"))]
    shares = json.loads(CliRunner().invoke(app, [*asked, "--json"]).output)["energy"][1:]
    lines = CliRunner().invoke(app, asked).output.splitlines()
    first = next(k for k, line in enumerate(lines) if line.startswith("Share of each")) + 1
    assert [line.split() for line in lines[first : first + 8]] == [
        [f"{share:.0%}" for share in shares[8 * k : 8 * k + 8]] for k in range(8)
    ]
    FAMILIES["wav2vec2"]().save_pretrained(tmp_path / "hears")
    tf.Wav2Vec2FeatureExtractor().save_pretrained(tmp_path / "hears")
    write_wav(tmp_path / "clip.wav", 0.004)
    asked = ["tokens", str(tmp_path / "hears"), "--audio", str(tmp_path / "clip.wav")]
    shares = json.loads(CliRunner().invoke(app, [*asked, "--json"]).output)["energy"]
    curve = next(line for line in CliRunner().invoke(app, asked).output.splitlines() if "█" in line)
    bars = curve.split(" s ")[1].split()[0]
    assert len(bars) == len(shares)
    assert bars[shares.index(max(shares))] == "█"
    assert curve.startswith("0.00 s ")
