"""Attention on probability measures: token sequences of any length, weighted, infinitely many, compared by transport."""

from lipscope.meanfield.attention import MeanFieldAttention
from lipscope.meanfield.laws import Ball, Empirical, Gaussian, GaussianMixture, Law, Sphere, parse_law
from lipscope.meanfield.measures import Measure, PositionedMeasure
from lipscope.meanfield.operator import WeightedOperator, local_constant, mean_field_operator
from lipscope.meanfield.transport import conditional_wasserstein, distance, optimal_plan, wasserstein

__all__ = [
    "Ball",
    "Empirical",
    "Gaussian",
    "GaussianMixture",
    "Law",
    "MeanFieldAttention",
    "Measure",
    "PositionedMeasure",
    "Sphere",
    "WeightedOperator",
    "conditional_wasserstein",
    "distance",
    "local_constant",
    "mean_field_operator",
    "optimal_plan",
    "parse_law",
    "wasserstein",
]
