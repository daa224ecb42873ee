"""The command ``sensitivity``: which layers matter when keys, values, activations or weights are rounded or noisy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from lipscope.cli import options as opt
from lipscope.cli.options import option
from lipscope.cli.terminal import echo, notice, print_table

if TYPE_CHECKING:
    from lipscope.studies.sensitivity import Sensitivity


def sensitivity(
    model: opt.ModelName,
    text: opt.Text = "python-docs",
    perturb: Annotated[
        str,
        option(
            "fp8, e5m2, bf16, int8, noise:S or worst:S, then -k, -v, -kv, -input, -output or -weights; several with commas.",
            default=True,
        ),
    ] = "fp8-kv",
    verify: Annotated[bool, option("Also perturb every layer, and measure what it does.", "--verify")] = False,
    per_head: opt.PerHead = False,
    damage: Annotated[
        str | None, option("kl or hidden (the last hidden state); by default kl where there are logits.")
    ] = None,
    n: opt.N = 64,
    inputs: opt.Inputs = 4,
    probes: Annotated[int, option("Backward passes, for all layers together.", default=True)] = 16,
    seed: opt.Seed = 0,
    emit: Annotated[
        str | None, option("vllm: options that spare layers, if --verify supports it.", panel=opt.OUTPUT)
    ] = None,
    out: Annotated[Path | None, option("Directory for the rows.", panel=opt.OUTPUT)] = None,
    as_json: opt.AsJson = False,
) -> None:
    """Predict what rounding or noise in each layer does to the outputs, beside σ, and verify it."""
    from lipscope.studies.rows import write_study
    from lipscope.studies.sensitivity import sensitivity as run

    if emit not in (None, "vllm"):
        raise ValueError(f"--emit must be vllm, got {emit!r}")
    names = perturb.split(",")
    found = run(
        model,
        text,
        perturb=names,
        verify=verify,
        n=n,
        inputs=inputs,
        per_head=per_head,
        damage=damage,
        probes=probes,
        seed=seed,
    )
    if out is not None:
        write_study(out, found.to_rows())
        notice(f"rows are in {out}")
    if as_json:
        echo(json.dumps(found.to_rows(), indent=1), data=True)
    elif emit is None:
        for name in names:
            _print(found, name)
    if emit is not None:
        echo(found.vllm(names[0]), data=True)
        left = found.together[names[0]]
        notice(
            f"verified on {inputs * n} tokens of {text}, and on nothing else: {left['all']:.3g} {found.damage} with all "
            f"layers rounded, {left['spared']:.3g} with these spared, {left['spared_by_sigma']:.3g} as many by σ"
        )


def _print(found: Sensitivity, name: str) -> None:
    from lipscope.studies.sensitivity import PREDICTORS

    shown = {"layer": "d", "head": "d", "estimate": ".4g", "typical": ".3g", "stable_rank": ".3g", "size": ".2g",
             "predicted": ".3g", "predicted_low": ".3g", "predicted_high": ".3g", "measured": ".3g"}  # fmt: skip
    words = PREDICTORS | {"size": "‖δ‖/‖x‖", "predicted": "predicted", "predicted_low": "from", "predicted_high": "to"}
    rows = found.to_rows(name)
    columns = {column: digits for column, digits in shown.items() if rows[0].get(column) is not None}
    print_table(
        [words.get(column, column) for column in columns],
        [[format(row[column], digits) for column, digits in columns.items()] for row in rows],
        title=f"{found.model}: {name} in one layer at a time, on {found.text}",
        caption=f"damage in {found.damage}, with 95 % intervals; {found.backward_passes} backward passes for all layers",
    )
    matter = found.matter(name)
    echo(f"half of the predicted damage is in {len(matter)} of {len({row['layer'] for row in rows})} layers: {matter}")
    if name in found.together:
        ranks = [f"{words[key]} {value:.2f} [{a:.2f}, {b:.2f}]" for key, (value, a, b) in found.correlations(name).items()]
        echo(f"rank correlation with the measured damage: {', '.join(ranks)}")
