"""Token substitutions: the gradient through the whole model, exact re-measurement, and what may be replaced."""

import itertools

import pytest
import torch
from torch import nn

import lipscope
from lipscope.attention.operators import AttentionOperator
from lipscope.measure.gradient import sigma_gradient
from lipscope.models.load import ByteTokenizer
from lipscope.studies.worst_case import attack_tokens
from lipscope.studies.worst_case.tokens import Vocabulary, embedding_gradient
from model_families import FAMILIES

IDS = torch.tensor([7, 21, 33, 12, 45])


def sigma(handle, layer, head=None, **tokens):
    """σ by a dense SVD of the layer's Jacobian at these tokens."""
    recording = handle.record(handle.token_inputs(**tokens))
    scope, heads = ("attention", None) if head is None else ("head", [head])
    return recording[layer].sigma(scope, heads=heads, solver=lipscope.Dense()).estimate.flatten()


@pytest.fixture(scope="module")
def models():
    return {name: lipscope.load(FAMILIES[name]()) for name in ("bert", "gpt2", "llama")}


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "qwen3", "gemma2", "gpt_oss", "bloom", "albert"])
def test_gradient_through_the_model_equals_finite_differences(name, models):
    handle = models[name] if name in models else lipscope.load(FAMILIES[name]())
    recording = handle.record(handle.token_inputs(input_ids=IDS))
    for layer, head in ((0, None), (1, None), (1, 2)):
        found = embedding_gradient(recording[layer], head)
        e = found.embeddings
        step = torch.randn(e.shape, generator=torch.Generator().manual_seed(2), dtype=e.dtype)
        h = 1e-5 * float(e.norm() / step.norm())
        above, below = (sigma(handle, layer, head, inputs_embeds=e + sign * h * step) for sign in (1, -1))
        slope = float(above - below) / (2 * h)
        assert float((found.at_embeddings * step).sum()) == pytest.approx(slope, rel=1e-4)


def test_two_ways_to_the_gradient_of_a_plain_layer(models):
    """Through the model by differentiating twice, and by hand from the layer's weights."""
    handle = models["gpt2"]
    recording = handle.record(handle.token_inputs(input_ids=IDS))
    found = embedding_gradient(recording[1])
    plain, X = recording[1].attention, recording[1].tokens("attention")
    operator = AttentionOperator.at(plain, X)
    U, _, Vh = torch.linalg.svd(operator.to_dense())
    by_hand = sigma_gradient(operator, U[:, :, 0], Vh[:, 0])
    torch.testing.assert_close(found.at_layer, by_hand, rtol=1e-6, atol=1e-8 * float(by_hand.abs().max()))


@pytest.mark.parametrize(("name", "layer", "head"), [("bert", 1, None), ("gpt2", 0, 2), ("llama", 1, None)])
def test_one_substitution_is_the_best_of_all(name, layer, head, models):
    handle = models[name]
    ids = IDS[:4]
    found = attack_tokens(handle, input_ids=ids, layer=layer, head=head, k=1, candidates=4 * 50)
    usable = Vocabulary(handle).usable.nonzero()[:, 0].tolist()
    texts = [[*ids[:i].tolist(), w, *ids[i + 1 :].tolist()] for i, w in itertools.product(range(4), usable)]
    everything = sigma(handle, layer, head, input_ids=torch.tensor(texts))
    assert float(found.after.estimate.flatten()[0]) == pytest.approx(float(everything.max()), rel=1e-3)
    assert float(found.after.estimate.flatten()[0]) > float(found.before.estimate.flatten()[0])
    assert int((found.after_ids != found.before_ids).sum()) == 1 == len(found.substitutions)


def test_scores_are_the_first_order_change_towards_each_word(models):
    """A small step from a token towards a word changes σ by that share of the predicted change."""
    handle = models["bert"]
    words = Vocabulary(handle)
    found = attack_tokens(handle, input_ids=IDS, layer=1, k=1, candidates=40)
    e = words.embeddings[IDS]
    for trial in found.tried[::8]:
        step = torch.zeros_like(e)
        step[trial.position] = 1e-4 * (words.embeddings[trial.word] - e[trial.position])
        above, below = (float(sigma(handle, 1, inputs_embeds=e + sign * step)) for sign in (1, -1))
        assert (above - below) / 2e-4 == pytest.approx(trial.predicted, rel=1e-4)


def test_at_most_k_tokens_and_beam_is_no_worse_than_greedy(models):
    handle = models["gpt2"]
    reports = []
    greedy = attack_tokens(handle, input_ids=IDS, layer=1, k=2, candidates=12, progress=lambda *what: reports.append(what))
    beam = attack_tokens(handle, input_ids=IDS, layer=1, k=2, candidates=12, beam=3)
    for found in (greedy, beam):
        assert int((found.after_ids != found.before_ids).sum()) <= 2
        positions = [s.position for s in found.substitutions]
        assert len(set(positions)) == len(positions)
        assert found.substitutions[-1].sigma == pytest.approx(float(found.after.estimate[0]), rel=1e-3)
        sigmas = [float(found.before.estimate[0]), *(s.sigma for s in found.substitutions)]
        assert sigmas == sorted(sigmas)
        # The final value is what an independent dense measurement of the new ids says.
        assert float(found.after.estimate[0]) == pytest.approx(float(sigma(handle, 1, input_ids=found.after_ids)), rel=1e-3)
    assert float(beam.after.estimate[0]) >= float(greedy.after.estimate[0]) * (1 - 1e-3)
    assert reports[-1][:2] == (2, 2)
    assert greedy.retokenises is None
    assert {"round", "position", "before", "after", "predicted", "sigma"} == greedy.steps()[0].keys()
    # The worst text is measured with a start vector of its own, from which the interval can be had again.
    assert [row["start_seed"] for row in greedy.to_rows()] == [0, greedy.start_seed]
    assert greedy.start_seed != beam.start_seed
    repeated = handle.record(input_ids=greedy.after_ids)[1].sigma(solver=lipscope.Auto(seed=greedy.start_seed))
    assert float(repeated.upper[0]) == float(greedy.after.upper[0])


def test_special_tokens_are_neither_replaced_nor_put_in(models):
    handle = models["gpt2"]  # bos 1, eos 2
    ids = torch.tensor([1, 7, 21, 2])
    found = attack_tokens(handle, input_ids=ids, layer=0, k=4, candidates=30)
    assert found.after_ids[[0, 3]].tolist() == [1, 2]
    assert not set(found.after_ids[1:3].tolist()) & {1, 2}
    assert len(found.substitutions) <= 2
    assert all(trial.word not in (1, 2) for trial in found.tried)
    with pytest.raises(ValueError, match="special tokens only"):
        attack_tokens(handle, input_ids=torch.tensor([1, 2]), layer=0)


def test_text_before_and_after():
    model = FAMILIES["gpt2"]()
    model.resize_token_embeddings(300)  # more words than the tokenizer can write
    handle = lipscope.load(model, ByteTokenizer())
    found = attack_tokens(handle, "abcd", layer=0, k=1, candidates=20)
    assert found.before_text == "abcd"
    assert found.after_text != "abcd"
    assert len(found.after_text) == 4
    assert int(found.after_ids.max()) < 256
    assert found.retokenises == (list(found.after_text.encode()) == found.after_ids.tolist())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"k": 0}, "k must be at least 1, got 0"),
        ({"beam": 0}, "beam must be at least 1, got 0"),
        ({"candidates": 0}, "candidates must be at least 1"),
        ({"layer": 9}, "layer must lie between 0 and 1, got 9"),
        ({"head": 9}, "head must lie between 0 and 3"),
        ({"input_ids": torch.tensor([[5, 6], [7, 8]])}, "input_ids holds 2 texts"),
        ({"input_ids": torch.tensor([99])}, "input_ids must lie between 0 and 49"),
        ({"input_ids": None, "text": "a"}, "has no tokenizer"),
        ({"text": "a"}, "give exactly one of"),
    ],
)
def test_bad_input(arguments, message, models):
    with pytest.raises(ValueError, match=message):
        attack_tokens(models["gpt2"], **({"input_ids": IDS, "layer": 0} | arguments))


def test_a_model_without_tokens_is_refused():
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).eval()
    with pytest.raises(ValueError, match="no token embeddings"):
        Vocabulary(lipscope.load(layer))
