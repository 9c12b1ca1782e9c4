"""`updraft bench router`: quality of a router learned from graded prompts, by RouteLLM's protocol and more.

Without a test file every row is scored by five-fold cross-validation, in which the scored fold is never used for
training. With a test file the router is trained on the first file and scored on the second. Seeds draw folds or labels.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...classifier.arrays import Floats
from ...classifier.evaluation import cost_quality as curve
from ...classifier.evaluation.metrics import auroc, bootstrap, ece, ece_by_chance
from ...classifier.features.blocks import Mode
from ...classifier.features.feature_rows import FeatureRows, featurise
from ...classifier.graded_row import GradedRow, gains, scores
from ...classifier.grading.graded_data import Columns, read_graded
from ...classifier.policy.calibration_scope import scripts_of
from ...classifier.target import COUNTED
from ...classifier.training.router_model import Labels, RouterModel, Topics, fit_router
from ...protocol.errors import InvalidRequestError
from . import coverage as guarantee
from .robustness import robustness

FOLDS = 5
# Domains with faulty rows in RouteLLM's MMLU file: in the first, the strong model scores only 3 %; the second holds a
# fifth of all rows in which the strong model is better.
FAULTY_DOMAINS = ("high_school_mathematics", "moral_scenarios")
_MIN_IN_DOMAIN = 50
_CODE = re.compile(r"```|\[PYTHON\]|^\s*(?:def|class|import|function|#include|return)\b|[{};]\s*$", re.MULTILINE)
_MATHEMATICS = re.compile(r"\\[a-z]+\{|\$[^$\n]+\$|[\w)]\s*[=^]\s*[\w(\\]|\d\s*[+*]\s*\d|\d [-/] \d")
_BOOTSTRAPS = 200
_RANDOM_ROUTERS = 10
# Number of simulated calibrations per population of known risk.
DRAWS = 2_000


@dataclass(frozen=True, slots=True)
class RouterBenchOptions:
    """Options. Each seed samples `labels` rows to train on; prompts of the other rows are used without grades."""

    data: Path
    test: Path | None = None
    labels: int | None = None
    mode: Mode = "prompt"
    seeds: int = 5
    columns: Columns | None = None


@dataclass(frozen=True, slots=True)
class SeedScores:
    """One seed's P(gain) of every scored row, (n,), the rows' folds, and the routers that scored them."""

    p_gain: Floats
    folds: NDArray[np.int64]
    routers: list[RouterModel]

    @property
    def ranked(self) -> Floats:
        return within_folds(self.p_gain, self.folds)


@dataclass(frozen=True, slots=True)
class RouterMeasurements:
    """Metrics by name, and for the plot the cost-quality curves of the first seed's router and of the oracle."""

    metrics: dict[str, Any]
    curve: curve.CostQualityCurve
    oracle: curve.CostQualityCurve


def measure(options: RouterBenchOptions, say: Callable[[str], None]) -> RouterMeasurements:
    """Train and score the routers. Raises InvalidRequestError if the files cannot be used or are too small."""
    train, test, left_out = _rows(options)
    say(f"reading {len(train) + len(test)} prompts")
    pool = _Pool(featurise(train, options.mode), Labels.of(*scores(train)), options.labels)
    test_features = featurise(test, options.mode) if test else None
    runs: list[SeedScores] = []
    for seed in range(options.seeds):
        runs.append(
            _cross_validated(train, pool, seed) if test_features is None else _held_out(pool, test_features, seed)
        )
        say(f"seed {seed} of {options.seeds} is done")
    scored = test or train
    weak, strong = scores(scored)
    metrics = {
        "rows": len(scored),
        "train_rows": len(train),
        "train_rows_left_out": left_out,
        "weak": float(weak.mean()),
        "strong": float(strong.mean()),
        **_routing(runs, scored),
        **_probability(runs, scored),
        **_promise(runs, scored),
        **robustness(runs[0].routers[0], scored, options.mode),
    }
    oracle = curve.fine_curve(curve.oracle_scores(weak, strong), weak, strong)
    return RouterMeasurements(metrics, curve.fine_curve(runs[0].ranked, weak, strong), oracle)


def _rows(options: RouterBenchOptions) -> tuple[list[GradedRow], list[GradedRow], int]:
    """Return training rows, test rows, and the number of training rows dropped because the test has the same prompt."""
    train = read_graded(options.data, options.columns)
    test = read_graded(options.test, options.columns) if options.test else []
    test_prompts = {row.prompt for row in test}
    rows = [row for row in train if row.prompt not in test_prompts]
    if not rows:
        raise InvalidRequestError(
            f"Every prompt of {options.data} is also in {options.test}: no row is left to train on."
        )
    most = len(rows) if test else len(rows) - len(rows) // FOLDS
    if options.labels is not None and options.labels > most:
        raise InvalidRequestError(
            f"{options.labels} labels requested, but there are only {most} training rows.", param="labels"
        )
    return rows, test, len(train) - len(rows)


@dataclass(frozen=True, slots=True)
class _Pool:
    """Features and grades of the training rows. Each router uses the grades of only `labels` rows; None: of all."""

    features: FeatureRows
    grades: Labels
    labels: int | None

    def fitted(self, training: NDArray[Any], rng: np.random.Generator, seed: int) -> RouterModel:
        """Fit a router that uses no row outside `training`."""
        order = rng.permutation(training)
        labelled = order[: self.labels]
        topics = Topics.fit(self.features.counts[order], seed)
        return fit_router(self.features.take(labelled), self.grades.take(labelled), topics, seed)


def _cross_validated(rows: list[GradedRow], pool: _Pool, seed: int) -> SeedScores:
    """Compute each row's P(gain) by a router fitted without the row's fold; equal prompts share a fold."""
    rng = np.random.default_rng(seed)
    _, same = np.unique([row.prompt for row in rows], return_inverse=True)
    folds = (rng.permutation(same.max() + 1) % FOLDS)[same]
    p_gain = np.zeros(len(rows))
    routers: list[RouterModel] = []
    for fold in range(FOLDS):
        held = np.flatnonzero(folds == fold)
        routers.append(pool.fitted(np.flatnonzero(folds != fold), rng, seed))
        p_gain[held] = routers[-1].probability(pool.features.take(held))
    return SeedScores(p_gain, folds, routers)


def _held_out(pool: _Pool, test: FeatureRows, seed: int) -> SeedScores:
    router = pool.fitted(np.arange(len(pool.grades.weak)), np.random.default_rng(seed), seed)
    p_gain = router.probability(test)
    return SeedScores(p_gain, np.zeros(len(p_gain), np.int64), [router])


def _routing(runs: Sequence[SeedScores], rows: list[GradedRow]) -> dict[str, Any]:
    weak, strong = scores(rows)
    curves = [curve.cost_quality(run.ranked, weak, strong) for run in runs]
    ranked = [run.ranked for run in runs]

    def resampled(chosen: NDArray[np.int64]) -> float:
        return float(np.mean([curve.cost_quality(r[chosen], weak[chosen], strong[chosen]).apgr for r in ranked]))

    low, high = bootstrap(resampled, len(rows), draws=_BOOTSTRAPS)
    return {
        "apgr": float(np.mean([c.apgr for c in curves])),
        "apgr_std": float(np.std([c.apgr for c in curves])),
        "apgr_low": low,
        "apgr_high": high,
        "apgr_fine": float(np.mean([curve.fine_curve(r, weak, strong).apgr for r in ranked])),
        **_cleaned(runs, rows),
        "cpt50": float(np.mean([c.cpt(0.5) for c in curves])),
        "cpt80": float(np.mean([c.cpt(0.8) for c in curves])),
        "oracle_apgr": curve.cost_quality(curve.oracle_scores(weak, strong), weak, strong).apgr,
        "random_apgr": random_apgr(weak, strong),
    }


def _cleaned(runs: Sequence[SeedScores], rows: list[GradedRow]) -> dict[str, float]:
    """Return the APGR of the same scores without the rows of the faulty domains, if the file has any."""
    usable = np.array([row.domain not in FAULTY_DOMAINS for row in rows], np.bool_)
    if usable.all():
        return {}
    weak, strong = scores(rows)
    apgrs = [curve.cost_quality(run.ranked[usable], weak[usable], strong[usable]).apgr for run in runs]
    return {"apgr_cleaned": float(np.mean(apgrs)), "apgr_cleaned_std": float(np.std(apgrs))}


def _probability(runs: Sequence[SeedScores], rows: list[GradedRow]) -> dict[str, Any]:
    """Return ranking and calibration of P(gain): overall and within every domain with enough rows."""
    gain = gains(rows)
    domains = np.array([row.domain for row in rows])
    names, counts = np.unique(domains, return_counts=True)
    large = [str(name) for name, n in zip(names, counts, strict=True) if name and n >= _MIN_IN_DOMAIN]
    return {
        "gain_rate": float(gain.mean()),
        "auroc": float(np.mean([auroc(run.ranked, gain) for run in runs])),
        "ece": float(np.mean([ece(run.p_gain, gain) for run in runs])),
        "ece_by_chance": float(np.mean([ece_by_chance(run.p_gain) for run in runs])),
        "ece_by_domain": {
            name: float(np.mean([ece(run.p_gain[domains == name], gain[domains == name], bins=5) for run in runs]))
            for name in large
        },
        "strata": _strata(runs, rows),
    }


def _strata(runs: Sequence[SeedScores], rows: list[GradedRow]) -> dict[str, float]:
    """Return ranking and calibration for code, mathematics, and each script of other rows, if there are enough rows."""
    gain = gains(rows)
    kinds = np.array([_kind(row.prompt) for row in rows])
    strata: dict[str, float] = {}
    for name, n in zip(*np.unique(kinds, return_counts=True), strict=True):
        inside = kinds == name
        if n >= _MIN_IN_DOMAIN and 0 < gain[inside].mean() < 1:
            strata |= {
                f"{name}.rows": int(n),
                f"{name}.gain_rate": float(gain[inside].mean()),
                f"{name}.auroc": float(np.mean([auroc(run.ranked[inside], gain[inside]) for run in runs])),
                f"{name}.ece": float(np.mean([ece(run.p_gain[inside], gain[inside], bins=5) for run in runs])),
            }
    return strata


def _kind(prompt: str) -> str:
    if _CODE.search(prompt):
        return "code"
    return "mathematics" if _MATHEMATICS.search(prompt) else "_".join(sorted(scripts_of(prompt))) or "no_letters"


def _promise(runs: Sequence[SeedScores], rows: list[GradedRow]) -> dict[str, Any]:
    """Return how well each kind of promise holds, on populations of known risk and on random halves of `rows`."""
    figures: dict[str, Any] = {}
    for alpha in guarantee.ALPHAS:
        net = guarantee.net_splits(runs[0].p_gain, *scores(rows), 1.0 - alpha)
        figures |= {f"net_{name}_{alpha:g}": figure for name, figure in net.items()}
    gain = gains(rows)
    shapes = guarantee.populations()
    for alpha in guarantee.ALPHAS:
        for promise in COUNTED:
            rule = guarantee.promised(alpha, promise)
            of = f"{alpha:g}" if promise == "no-loss" else f"{promise}_{alpha:g}"
            true = {shape.name.replace(" ", "_"): guarantee.true_risks(shape, rule, draws=DRAWS) for shape in shapes}
            rates = {name: float((risks > alpha).mean()) for name, risks in true.items()}
            figures |= split_figures(guarantee.half_splits(runs[0].p_gain, gain, alpha, rule), of)
            figures |= {
                f"violation_rate_{of}": max(rates.values()),
                f"violation_rates_{of}": rates,
                f"expected_risk_{of}": max(float(risks.mean()) for risks in true.values()),
            }
    return figures


def split_figures(splits: guarantee.HalfSplits, of: str) -> dict[str, float]:
    """Return figures by name. Names end in `of`, which states alpha and any kind of promise other than the default."""
    return {
        f"risk_{of}": splits.risk,
        f"exceedance_{of}": splits.exceedance,
        f"exceedance_by_noise_{of}": splits.exceedance_by_noise,
        f"cloud_share_{of}": splits.share,
        f"share_over_hindsight_{of}": splits.share_over_hindsight,
        # Equal for both kinds of promise, because both use the same halves.
        f"hindsight_cloud_share_{splits.alpha:g}": splits.hindsight_share,
        f"always_over_hindsight_{splits.alpha:g}": splits.cloud_only_over_hindsight,
    }


def random_apgr(weak: Floats, strong: Floats, seed: int = 0) -> float:
    """Return the mean APGR of ten random routers."""
    rng = np.random.default_rng(seed)
    return float(
        np.mean([curve.cost_quality(rng.random(len(weak)), weak, strong).apgr for _ in range(_RANDOM_ROUTERS)])
    )


def within_folds(scores: Floats, folds: NDArray[np.int64]) -> Floats:
    """Replace each score by its rank within its fold, in (0, 1), because each fold is scored by a different router."""
    out = np.empty(len(scores))
    for fold in np.unique(folds):
        rows = folds == fold
        out[rows] = (curve.ranks(scores[rows]) + 0.5) / rows.sum()
    return out
