"""Attention on probability measures: token sequences of any length, weighted, infinitely many, compared by transport."""

from lipscope.runs.fit import PlateauFit, fit_plateau
from lipscope.studies.mean_field.attention import MeanFieldAttention
from lipscope.studies.mean_field.laws import Ball, Empirical, Gaussian, GaussianMixture, Law, Sphere, parse_law
from lipscope.studies.mean_field.measures import Measure, PositionedMeasure
from lipscope.studies.mean_field.operator import WeightedOperator, local_constant, mean_field_operator
from lipscope.studies.mean_field.pairs import EmpiricalConstant, PairRatio, ascend, empirical_constant, pair_ratio, set_bound
from lipscope.studies.mean_field.starts import two_diracs
from lipscope.studies.mean_field.study import PlateauStudy, StudyRow, convergence_study
from lipscope.studies.mean_field.transport import conditional_wasserstein, distance, optimal_plan, wasserstein

__all__ = [
    "Ball",
    "Empirical",
    "EmpiricalConstant",
    "Gaussian",
    "GaussianMixture",
    "Law",
    "MeanFieldAttention",
    "Measure",
    "PairRatio",
    "PlateauFit",
    "PlateauStudy",
    "PositionedMeasure",
    "Sphere",
    "StudyRow",
    "WeightedOperator",
    "ascend",
    "conditional_wasserstein",
    "convergence_study",
    "distance",
    "empirical_constant",
    "fit_plateau",
    "local_constant",
    "mean_field_operator",
    "optimal_plan",
    "pair_ratio",
    "parse_law",
    "set_bound",
    "two_diracs",
    "wasserstein",
]
