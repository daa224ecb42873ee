"""``make attack``: lipscope under hostile spectra, kills, damage, nonsense, injections, load and little memory.

    python checks/attack.py --seed 0 [--only kills,damage] [--quick] [--write docs/reliability.md] [--yes]

Everything is bounded in count and time, happens in a temporary directory and on the loopback interface, and ends only
processes that it started. The exit status is 1 when anything failed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch

import attack_cluster
import attack_pages
import attack_stores
import fuzz
import spectra as hostile_spectra
from report_card import ROOT, Card, timed, write


@dataclass(frozen=True)
class Scene:
    """Where an attack happens."""

    directory: Path
    rng: random.Random
    quick: bool
    truth: Path  # the store of an undisturbed sweep
    life: float  # and how many seconds it took

    def made(self, name: str) -> Path:
        """A directory for a part of the attack."""
        place = self.directory / name
        place.mkdir()
        return place

    def times(self, count: int) -> int:
        """A tenth of the cases when time is short."""
        return max(count // 10, 2) if self.quick else count


def memory(card: Card, scene: Scene) -> None:
    """Peaks of whole processes against what was planned, and what was allowed."""
    layer = {"heads": 4, "mask": "causal"}
    cases = [{"layer": layer, "width": 64, "tokens": tokens, "inputs": inputs, **more}
             for tokens, inputs, more in ((512, 1, {}), (512, 4, {}), (1024, 1, {}), (1024, 2, {"share": 0.6}),
                                          (768, 3, {"share": 0.4}), (900, 1, {"solver": {"k": 3}}))]  # fmt: skip
    certified = {"layer": {"heads": 8}, "width": 128, "share": 0.6, "certificate": True}
    cases += [certified | {"tokens": tokens} for tokens in (512, 768)]
    scans = [{"scope": scope, "tokens": 256, "inputs": 2} for scope in ("attention", "head", "norm+attention")]
    chosen = [*cases, *scans][: scene.times(11)]
    program = [sys.executable, str(ROOT / "tests" / "measured_memory.py")]
    found = subprocess.run(program, input=json.dumps(chosen), capture_output=True, text=True, check=True, timeout=600).stdout
    shares = []
    for case, (peak, plan) in zip(chosen, json.loads(found), strict=True):
        shares.append(peak / plan)
        card.check(peak <= plan, f"{case}: {peak >> 20} MiB taken, {plan >> 20} MiB planned")
    card.details.append(f"peak between {min(shares):.2f} and {max(shares):.2f} of the plan")


def spectra(card: Card, scene: Scene) -> None:
    """Maps whose largest singular value is known."""
    seen = hostile_spectra.attack(scene.times(10_400), scene.rng.randrange(10**6), 420)
    card.tried += seen.items
    card.failures += [*seen.violations, *seen.errors, *(seen.wrong if not seen.ok else ())]
    converged = seen.statuses["converged"]
    card.details.append(
        f"{len(seen.violations)} intervals without σ; {len(seen.wrong)} of {converged:,} converged values off by over rtol"
    )


def nonsense(card: Card, scene: Scene) -> None:
    """Wrong types and absurd values in calls, on the command line and in files."""
    for name, cases in (
        ("calls of Python functions", fuzz.api(scene.rng, scene.made("api"), 0.02 if scene.quick else 0.5)),
        ("commands", fuzz.cli(scene.rng, scene.made("cli"), scene.times(400))),
        ("run directories", fuzz.files(scene.rng, scene.made("files"), scene.times(400))),
        ("clips and images", fuzz.media(scene.rng, scene.made("media"), scene.times(400))),
    ):
        before = card.tried
        for case in cases:
            card.check(not case.from_inside, lambda case=case: str(case))  # type: ignore[misc]
        card.details.append(f"{card.tried - before:,} {name}")


ATTACKS: dict[str, tuple[str, str, Callable[[Card, Scene], None]]] = {
    "spectra": ("Hostile spectra", "an interval without σ; over 1 in 10,000 converged values off by over rtol", spectra),
    "nonsense": ("Nonsense at the doors", "an error from the inside; a call that does not end; a traceback", nonsense),
    "kills": (
        "Sweeps killed or asked to end at random moments",
        "a row lost, doubled or changed; a request to end not obeyed; a traceback",
        lambda card, at: attack_stores.kills(card, at.directory, at.truth, at.life, at.rng, at.times(120)),
    ),
    "disks": (
        "Disks that fill up", "a row lost; a traceback",
        lambda card, at: attack_stores.full_disks(card, at.directory, at.truth, at.rng, at.times(16)),
    ),
    "damage": (
        "Damaged stores", "a row shown that was never measured; a row gone without a word; an error that is not the store's",
        lambda card, at: attack_stores.damage(card, at.directory, at.truth, at.rng, at.times(300)),
    ),
    "injections": (
        "Hostile strings in reports",
        "a script that runs; markup that gets in; a request to anybody; a complaint of the browser",
        lambda card, at: attack_pages.injections(card, at.directory, at.rng, at.times(500)),
    ),
    "view": (
        "The view server under load", "a request reset or refused; a traceback; another interface than loopback",
        lambda card, at: attack_pages.view_under_load(card, at.directory, at.rng, idle=300, requests=at.times(200)),
    ),
    "memory": ("Memory against its plan", "a peak above the plan or above what was allowed", memory),
    "cluster": (
        "Sweeps on Dask", "another interface than loopback; a row lost; a traceback; a process left behind",
        lambda card, at: attack_cluster.cluster(card, at.directory, at.truth),
    ),
}  # fmt: skip


def main() -> int:
    """Run the chosen attacks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=None, help="of everything drawn; a fresh one by default")
    parser.add_argument("--only", default=",".join(ATTACKS), help="attacks by name, with commas between")
    parser.add_argument("--quick", action="store_true", help="a tenth of the cases")
    parser.add_argument("--write", type=Path, help="the page whose table is written anew")
    parser.add_argument("--yes", action="store_true", help="run as root too")
    asked = parser.parse_args()
    if os.geteuid() == 0 and not asked.yes:
        print("attack: this kills processes and fills files: not as root, unless with --yes", file=sys.stderr)
        return 2
    if unknown := set(asked.only.split(",")) - ATTACKS.keys():
        parser.error(f"no attack is called {', '.join(sorted(unknown))}: there are {', '.join(ATTACKS)}")
    torch.set_num_threads(1)
    seed = random.SystemRandom().randrange(2**31) if asked.seed is None else asked.seed
    print(f"seed {seed}", flush=True)
    cards = []
    with tempfile.TemporaryDirectory(prefix="lipscope-attack-") as name:
        directory = Path(name)
        import lipscope

        lipscope.load("gpt2-mini")  # forked sweeps find it imported
        truth, life = attack_stores.undisturbed(directory)
        for which in asked.only.split(","):
            title, promise, attack = ATTACKS[which]
            place = directory / which
            place.mkdir()
            scene = Scene(place, random.Random(f"{seed} {which}"), asked.quick, truth, life)
            with timed(Card(title, promise)) as card:
                attack(card, scene)
            cards.append(card)
    if asked.write:
        write(asked.write, cards, seed)
    failed = sum(len(card.failures) for card in cards)
    print(f"{sum(card.tried for card in cards):,} cases, {failed} failures")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
