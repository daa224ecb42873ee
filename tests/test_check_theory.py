"""The independent check finds what is wrong and passes what is right: tiny versions of ``make check-theory``."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections import Counter

import numpy as np
import pytest
import torch

import certificates
import ends
import hostile
import layers
import lipscope
import theory
import transport
from ledger import Ledger, Truth
from lipscope.bounds import Bound, constants, pairs, registry, variants
from oracle import Problem, true_sigma

FULL = np.ones((1, 5, 5), dtype=bool)
NUMBER = 23  # a layer of one token with a query bias


def head(q: float = 0.0, **fields) -> Problem:
    W = np.eye(2)[None]
    return Problem(q * W, W, 3 * W, None, fields.pop("seen", FULL), scale=1.0, **fields)


def test_the_oracle_knows_uniform_averaging_and_the_cesaro_matrix() -> None:
    X = np.random.default_rng(0).normal(size=(2, 5, 2))
    causal = np.tril(FULL)
    cesaro = np.tril(np.ones((5, 5))) / np.arange(1, 6)[:, None]
    assert Truth(head(), X).sigma == pytest.approx(3.0, rel=1e-14)
    assert Truth(head(seen=causal), X).sigma == pytest.approx(3 * np.linalg.norm(cesaro, 2), rel=1e-14)


def test_autograd_and_mpmath_agree_on_every_kind_of_attention() -> None:
    rng = np.random.default_rng(1)
    X = rng.normal(size=(1, 3, 2))
    one = dataclasses.replace(
        head(0.7, seen=np.tril(np.ones((1, 3, 3), dtype=bool))), b_q=rng.normal(size=(1, 2)), b_v=rng.normal(size=(1, 2))
    )
    kinds = [
        one,
        dataclasses.replace(one, softcap=2.0, sinks=np.array([0.3])),
        dataclasses.replace(one, gain=np.ones(2), eps=1.0),
    ]
    kinds += [dataclasses.replace(one, kind=kind, eps=0.1) for kind in ("l2", "cosine", "qk-norm", "sigmoid")]
    for p in kinds:
        assert float(true_sigma(p, X[0], 50)) == pytest.approx(float(Truth(p, X).sigma[0]), rel=1e-12)


def test_a_layer_passes_and_a_wrong_bound_is_found() -> None:
    def wrong(layer: lipscope.Attention) -> list[Bound]:
        tokens = torch.zeros(1, layer.width, dtype=torch.float64)
        low = Bound("wrong.lower", 1e30, "set", "nothing", "nobody", {"n": 1}, side="lower", tokens=tokens)
        return [Bound("wrong.upper", 1e-30, "set", "nothing", "nobody"), low]

    ledger = layers.check_layer(0, NUMBER, wrong, steps=1)
    assert ledger["inputs"].cases == 32
    found = [violation for row in ledger.values() for violation in row.violations]
    assert len(ledger["wrong.upper"].violations) == 1
    assert len(ledger["wrong.lower"].violations) > 1
    assert all("wrong." in violation and f"--seed 0 --only layers:{NUMBER} " in violation for violation in found)


def test_a_wrong_interval_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    measure = lipscope.local_lipschitz

    def narrow(*args, **options):
        found = measure(*args, **options)
        return dataclasses.replace(found, lower=found.estimate * (1 + 1e-13), upper=found.estimate * (1 + 2e-13))

    monkeypatch.setattr(lipscope, "local_lipschitz", narrow)
    row = hostile.check_hostile(0, 7)["rounding: float64, dense"]
    assert len(row.violations) == 1


def test_transport_and_failures_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger()
    for number in range(4):
        ledger.add(transport.check_transport(0, number))
    ledger.add(ends.check_ends(0, 0))
    assert not any(row.violations for row in ledger.values())
    monkeypatch.setattr(
        transport, "wasserstein", lambda mu, nu, p: 1.001 * lipscope.studies.mean_field.wasserstein(mu, nu, p)
    )
    assert any(row.violations for row in transport.check_transport(0, 0).values())
    (row,) = ends.check_ends(0, 0).values()
    row.failures = row.cases // 5
    ends.judge_ends(Ledger({"end: one": row}), "")
    assert row.violations


def test_clopper_pearson() -> None:
    low, high = ends.limits(0, 100, 0.025)
    assert (low, high) == (0.0, pytest.approx(1 - 0.025 ** (1 / 100)))
    assert ends.limits(100, 100, 0.025)[1] == 1.0


def test_the_exit_status_and_the_page(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    page = tmp_path / "check.md"
    page.write_text("before\n<!-- begin checks/theory.py -->\nold\n<!-- end checks/theory.py -->\nafter\n")
    monkeypatch.setattr(sys, "argv", ["theory.py", "--only", "transport:1", "--write", str(page)])
    assert theory.main() == 0
    assert "0 violations" in page.read_text()
    assert "old" not in page.read_text()
    wrong = Ledger()
    wrong.record("refined.unmasked", math.inf, "no bound at all")
    monkeypatch.setitem(theory.CHECKS, "transport", lambda seed, number: wrong)
    assert theory.main() == 1
    assert "no bound at all" in page.read_text()


def test_products_that_cancel_are_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds that did not allow for the rounding of products would be found out, turned ones and those of variants too."""
    ledger = Ledger()
    for number in range(12):
        ledger.add(hostile.check_cancelling(0, number))
    assert not any(row.violations for row in ledger.values())
    assert {"cancelling: lower.meanfield", "cancelling: ramapuram2024.local"} <= ledger.keys()
    for module, number, name in ((constants, 25, "refined.unmasked"), (variants, 5, "bounded_scores.softmax")):
        monkeypatch.setattr(module, "rounding_unit", lambda *matrices: 0.0)
        assert hostile.check_cancelling(0, number)[f"cancelling: {name}"].violations
    monkeypatch.setattr(pairs, "rounding_unit", lambda *matrices: 0.0)
    assert hostile.check_cancelling(0, 3)["cancelling: lower.pair"].violations


def test_names_of_the_tables_are_registered_and_closed_forms_are_met() -> None:
    ledger = layers.check_layer(0, 9, steps=1)
    bounds = {name for name in ledger if "." in name and not name.startswith("interval") and name != "ball.certify"}
    assert bounds <= set(registry.names())
    assert {"lower.pair", "lower.groups", "lower.meanfield"} <= bounds


def test_lower_bounds_beyond_what_float64_can_hold_are_reached() -> None:
    """The masses that are needed, e^{−1200}, are not float64 numbers; a bound twice as large would be found out."""
    W = torch.eye(2, dtype=torch.float64)
    p = Problem(600 * np.eye(2)[None], -np.eye(2)[None], np.eye(2)[None], None, np.ones((1, 2, 2), dtype=bool), scale=1.0)
    E, at = layers.point_pairs(p, 1.0)[0]
    for mask, more, near in (("full", 1.0, 2e-3), ("causal", layers.averaging_norm(), 0.05)):
        layer = lipscope.Attention(q=600 * W, k=-W, v=W, mask=mask, scale=1.0)
        bound = registry.table(layer, radius=1.0, n=4)["lower.meanfield"]
        assert bound.value > 1e263
        share = float(layers.light_atom(p, at, E, 100) * more / bound.value)
        assert 1 - near < share < 1 + 1e-12


def test_a_causal_lower_bound_is_reached_by_the_light_atom_first() -> None:
    """Its pair is not among those that are best without a mask."""
    row = layers.check_layer(0, 433, steps=1)["lower.meanfield"]
    assert not row.violations
    assert 0.98 < row.closest < 1


@pytest.mark.parametrize("kind", dict.fromkeys(certificates.KINDS))
def test_the_search_over_rungs_sees_an_end_that_is_too_small(kind, monkeypatch) -> None:
    counts, closest = Counter(), {}
    assert certificates.check(kind, 3, counts, closest) == []
    assert counts[kind, "fast"] == counts[kind, "tight"] == 1
    right = certificates.certificate_at
    monkeypatch.setattr(certificates, "certificate_at", lambda *args, **options: (right(*args, **options)[0] / 1e3, None))
    assert len(certificates.check(kind, 3, counts, closest)) == 2
